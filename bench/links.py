"""Measures the share of its speed that a swarm keeps over emulated links, by codec.

    python bench/links.py --shoal target/release/shoal \
        --network target/release/examples/emulated_network

Two stages have a machine each. Every pass waits for a stated time, so that two cores can represent two devices. A
share is of the tokens a second of the same swarm on loopback with f32, measured just before. The bound is the
share that arithmetic allows: a step takes the larger of the passes' time and the bytes' time, and the transfer of
its first activation and its last gradient. Needs root, /dev/net/tun and `ip`.
"""

import argparse
import sys

import emulated
import machine as machines
import table
from model import Model
from shoal_run import SKIPPED_STEPS, Shoal
from sizes import size

STEPS = size(3, 1) + SKIPPED_STEPS
MICROBATCHES = size(24, 4)
STAGES = 2
CONTEXT = size(256, 32)
# Hidden sizes, and the wait of a pass in milliseconds: about the square of the hidden size.
SIZES = size({256: 2, 512: 8, 1024: 32, 2048: 128}, {64: 2, 128: 2})
MAIN = size(1024, 64)
RATES = size([50, 200, 1000], [200])  # Mbit/s
ROUND_TRIPS = size([0, 100], [10])  # ms
MODES = [("f32", 0), ("int8", 0), ("int8", 1)]
BYTES = {"f32": 4, "int8": 1 + 4 / 64}
# The goal: the least share of int8 where the bound allows it.
GOAL = 0.95


def tokens_per_second(shoal, hidden, codec, staleness, inside=None):
    model = Model(hidden=hidden, layers=STAGES, heads=hidden // 64, intermediate=64, context=CONTEXT,
                  batch=MICROBATCHES)
    outcome = shoal.swarm(
        model, machines=inside, flags=["--slow-down", str(SIZES[hidden])], stages=STAGES,
        microbatches=MICROBATCHES, steps=STEPS, dtype="f32", codec=codec, staleness=staleness,
    )
    return outcome.rate()


def bound(loopback, hidden, codec, staleness, rate, round_trip):
    """The largest possible share of the speed on loopback."""
    step = MICROBATCHES * CONTEXT / loopback
    each = CONTEXT * hidden * BYTES[codec] * 8 / (rate * 1e6 * emulated.CONTENT)
    # The transfer of the first activation and of the last gradient. With delayed updates the next step's passes
    # run meanwhile.
    filling = 0 if staleness else round_trip / 1e3 + 2 * each
    return step / (max(step, MICROBATCHES * each) + filling)


def measure(options, hidden, modes, links):
    shoal = Shoal(options.shoal)
    rows = []
    for rate, round_trip in links:
        # Measured again for each link: the load of the machine varies by more than the differences.
        loopback = tokens_per_second(shoal, hidden, "f32", 0)
        for codec, staleness in modes:
            ends = [{"up_mbit": rate}] * STAGES
            link = {"delay_ms": round_trip / 2, "queue_ms": 50}
            with emulated.machines(options.network, ends, link) as inside:
                share = tokens_per_second(shoal, hidden, codec, staleness, inside) / loopback
            best = bound(loopback, hidden, codec, staleness, rate, round_trip)
            mode = codec + (", staleness 1" if staleness else "")
            goal = "" if codec == "f32" or best < GOAL else "met" if share >= GOAL else "NOT met"
            rows.append([hidden, f"{rate} Mbit/s", f"{round_trip} ms", mode, f"{share:.3f}",
                         f"{best:.3f}", goal])
            print("  ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--network", required=True, help="the example emulated_network")
    parser.add_argument("--only", type=int, help="one hidden size")
    options = parser.parse_args()
    links = [(rate, round_trip) for rate in RATES for round_trip in ROUND_TRIPS]
    rows = [] if options.only not in (None, MAIN) else measure(options, MAIN, MODES, links)
    for hidden in SIZES:
        if hidden != MAIN and options.only in (None, hidden):
            rows += measure(options, hidden, MODES[:2], [(RATES[0], ROUND_TRIPS[-1])])
    table.show(
        "Two stages over emulated links",
        f"Shares are of the tokens a second on loopback in f32; the goal, {GOAL:.2f}, holds for int8 where "
        f"the bound allows it. {machines.line(machines.describe(sys.executable))}.",
        ["hidden", "link", "round trip", "mode", "share", "bound", "goal"],
        rows,
    )


if __name__ == "__main__":
    main()
