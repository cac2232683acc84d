"""Measures what a step gains where peers send gradients before they compute those of their weights.

    python bench/split.py --shoal target/release/shoal --shoal-before OLD --text TEXT \
        --network target/release/examples/emulated_network

Three stages have a machine each, and a step has few microbatches, so that most of it is the way up and down the
stages. With one microbatch the passes compute, since at most two stages do so at a time. With more, every pass
waits for a stated time, so that two cores can represent three devices; where a stage sends its gradient early, half the
wait of a backward pass comes after that. `OLD` is a binary that sends it last. Both train in turns, and their checkpoints
must be equal. On loopback two stages compute. Needs root, /dev/net/tun and `ip`.
"""

import argparse
import statistics
import sys

import emulated
import machine as machines
import table
from model import Model
from shoal_run import SKIPPED_STEPS, Shoal
from sizes import size
from worker import take_turns

STAGES = 3
STEPS = size(12, 1) + SKIPPED_STEPS
ROUNDS = size(3, 1)
WAIT = size(100, 5)  # ms
RATES = size([20, 100, 500], [100])  # Mbit/s
ROUND_TRIP = size(50, 10)  # ms
MICROBATCHES = size([2, 4], [2])
SENDS_LAST, SENDS_FIRST = "weights first", "input first"
WAITS = size(
    Model(hidden=512, layers=STAGES, heads=8, intermediate=64, context=256, batch=4),
    Model(hidden=64, layers=STAGES, heads=2, intermediate=64, context=32, batch=4),
)
COMPUTES_ONE = size(
    Model(hidden=512, layers=6, heads=8, intermediate=1376, context=128, batch=4),
    Model(hidden=64, layers=6, heads=2, intermediate=128, context=32, batch=4),
)
COMPUTES = size(
    Model(hidden=512, layers=6, heads=8, intermediate=1376, context=128, batch=16),
    Model(hidden=64, layers=6, heads=2, intermediate=128, context=32, batch=16),
)


class Contest:
    """Both binaries, by what they send first."""

    def __init__(self, options):
        binaries = {SENDS_LAST: options.shoal_before, SENDS_FIRST: options.shoal}
        # Binaries have texts of their own.
        self.binaries = {name: Shoal(path, text=options.text) for name, path in binaries.items()}

    def seconds(self, model, stages, microbatches, flags=(), inside=None, **run):
        """The seconds of a step with each binary: medians of the steps of all rounds."""
        hashes = set()

        def train(shoal):
            outcome = shoal.swarm(
                model, machines=inside, flags=flags, stages=stages, microbatches=microbatches, steps=STEPS, **run)
            hashes.add(outcome.checkpoint_hash)
            return outcome.seconds

        measured = take_turns(
            {name: lambda shoal=shoal: train(shoal) for name, shoal in self.binaries.items()}, ROUNDS)
        assert len(hashes) == 1, "the runs have different weights"
        return {name: statistics.median(sum(rounds, [])) for name, rounds in measured.items()}


def row_of(link, microbatches, passes, seconds):
    before, after = seconds[SENDS_LAST], seconds[SENDS_FIRST]
    row = [link, microbatches, passes, f"{before:.3f} s", f"{after:.3f} s", f"{after / before - 1:+.1%}"]
    print("  ".join(map(str, row)), file=sys.stderr, flush=True)
    return row


def over_links(contest, network):
    rows = []
    kinds = [(COMPUTES_ONE, 1, [], "computes")]
    kinds += [(WAITS, count, ["--slow-down", str(WAIT)], f"wait {WAIT} ms") for count in MICROBATCHES]
    for rate in RATES:
        for model, count, flags, passes in kinds:
            ends, link = [{"up_mbit": rate}] * STAGES, {"delay_ms": ROUND_TRIP / 2, "queue_ms": 50}
            with emulated.machines(network, ends, link) as inside:
                seconds = contest.seconds(model, STAGES, count, flags, inside, dtype="f32", codec="int8")
            rows.append(row_of(f"{rate} Mbit/s, {ROUND_TRIP} ms", count, f"f32, {passes}", seconds))
    return rows


def on_loopback(contest):
    """Two stages that compute, on a core each."""
    return [
        row_of("loopback", count, f"{dtype}, computes", contest.seconds(COMPUTES, 2, count, dtype=dtype))
        for dtype in ("f32", "bf16") for count in size([2, 16], [2])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--shoal-before", help="one that sends gradients last; the same if there is none")
    parser.add_argument("--text", required=True, help="a text to train on")
    parser.add_argument("--network", required=True, help="the example emulated_network")
    options = parser.parse_args()
    options.shoal_before = options.shoal_before or options.shoal
    contest = Contest(options)
    rows = on_loopback(contest) + over_links(contest, options.network)
    table.show(
        "Gradients that are sent before those of weights are computed",
        f"Seconds of a step, medians of {ROUNDS} alternated rounds of {STEPS - SKIPPED_STEPS} steps; every pair of runs has the "
        f"same weights. Over links three stages, which compute {COMPUTES_ONE.tokens_per_step()} tokens or wait in each pass, and "
        f"int8 between them; on loopback two stages that compute: {COMPUTES.describe()}. "
        f"{machines.line(machines.describe(sys.executable))}.",
        ["link", "microbatches", "passes", SENDS_LAST, SENDS_FIRST, "change"],
        rows,
    )


if __name__ == "__main__":
    main()
