"""The main numbers of the data plane: throughput over loopback, speed of the codecs, and an all-reduce.

`make bench-transport`, `make bench-codec` and `make bench-all-reduce` measure the rest.
"""

import argparse

import all_reduce
import codec
import transport
from sizes import size

# The millions of values, and the number of peers.
CASE = (10, size(4, 2))


def measure(tools):
    """Prints the tables, and gives their numbers."""
    codecs, packings = codec.ours(tools.codec_speed)
    codec.show_codecs(codecs, [])
    alone = argparse.Namespace(shoal=tools.shoal, hivemind=None, speed=tools.speed, arithmetic=tools.arithmetic)
    return {
        "bulk": transport.loopback(tools),
        "codecs": codecs,
        "packings": packings,
        "all_reduce": all_reduce.loopback(alone, [CASE]),
    }
