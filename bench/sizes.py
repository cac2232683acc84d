"""The size of a measurement: full, or small enough to see within seconds that a benchmark still works.

`make bench-smoke` sets the variable; a table that is printed then says nothing about speed.
"""

import os

VARIABLE = "SHOAL_BENCH_SMOKE"
SMOKE = os.environ.get(VARIABLE) == "1"


def size(full, smoke):
    """The value for a full measurement, or the one for a smoke test."""
    return smoke if SMOKE else full
