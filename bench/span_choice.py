"""Measures spans that the coordinator chooses, beside one stage at each peer (SWARM) and all at each (ATOM).

    python bench/span_choice.py --shoal target/release/shoal --network target/release/examples/emulated_network

Four peers train four stages over emulated links. Every pass waits so long that the processor is not what limits them.
The peers of `auto` begin with one stage each and memory for all; what counts are the last steps of each run, when spans
do not change any more. Needs root, /dev/net/tun and `ip`.
"""

import argparse
import statistics
import sys

import emulated
import machine as machines
import table
from model import Model
from shoal_run import Shoal
from sizes import size

STAGES = 4
# Much to send for each weight, and little: hidden numbers, tokens of a sample, samples of a microbatch, microbatches.
SHAPES = size({"long": (64, 128, 4, 64), "wide": (256, 32, 1, 16)}, {"small": (64, 32, 1, 8)})
# Milliseconds that each pass over a microbatch waits.
WAIT = 15
RATES = size([20, 100, 500], [100])  # Mbit/s
DELAY = 50  # ms each way
MODES = {"SWARM": None, "ATOM": "all", "auto": "auto"}
# Steps of a run, and the last ones, which count.
STEPS = {"SWARM": size(9, 3), "ATOM": size(9, 3), "auto": size(24, 3)}
COUNTED = size(6, 1)
GOAL = 0.95


def rate_of(outcome):
    """Tokens per second of the last steps."""
    return outcome.tokens_per_step / statistics.median(outcome.seconds[-COUNTED:])


def measure(options):
    shoal = Shoal(options.shoal)
    rows = []
    for shape, (hidden, context, samples, microbatches) in SHAPES.items():
        model = Model(hidden=hidden, layers=STAGES, heads=4, intermediate=4 * hidden, context=context,
                      batch=samples * microbatches)
        for rate in RATES:
            rates = {}
            for mode, stage in MODES.items():
                link = {"delay_ms": DELAY, "queue_ms": 50}
                flags = ["--slow-down", str(WAIT), "--rebalance", "5"]
                with emulated.machines(options.network, [{"up_mbit": rate}] * STAGES, link) as inside:
                    outcome = shoal.swarm(model, microbatches=microbatches, stages=STAGES, steps=STEPS[mode],
                                          dtype="f32", machines=inside, stage=stage, flags=flags)
                rates[mode] = rate_of(outcome)
                print(f"{shape}, {rate} Mbit/s, {mode}: {rates[mode]:.0f} tokens/s",
                      file=sys.stderr, flush=True)
            share = rates["auto"] / max(rates["SWARM"], rates["ATOM"])
            rows.append([shape, f"{rate} Mbit/s", *(f"{rates[mode]:.0f}" for mode in MODES),
                         f"{share:.2f}", "met" if share >= GOAL else "NOT met"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--network", required=True, help="the example emulated_network")
    options = parser.parse_args()
    table.show(
        "Chosen spans over emulated links",
        f"{STAGES} stages of one layer, {STAGES} peers, {2 * DELAY} ms round trip; a pass waits {WAIT} ms. "
        f"The goal is {GOAL} of the better one. {machines.line(machines.describe(sys.executable))}.",
        ["shape", "link", "SWARM, tokens/s", "ATOM, tokens/s", "auto, tokens/s", "of the better one", "goal"],
        measure(options),
    )


if __name__ == "__main__":
    main()
