"""Measures simultaneous newcomers: processes that join a training run at once, and many that start a run at once.

    make bench-storm

Passes wait, so that two cores can represent a device for each process; the start of the processes is not
simulated. `make bench-storm` has the simulator's 200 newcomers as well (scheduler/examples/storm.rs).
"""

import argparse
import itertools
import sys
import time

import machine as machines
import table
from overhead import killed_in_the_end
from peer import Peer
from shoal_run import Shoal
from sizes import size
from uneven import run_of, started

# The stages, the peers before, the newcomers, and the wait of a pass in milliseconds.
STAGES, BEFORE, CROWD, WAIT = size((2, 4, 12, 40), (2, 4, 2, 5))
MICROBATCHES, STEPS, WINDOW = size((48, 400, 6), (12, 10_000, 2))
# Processes that start before the first step.
MANY, MANY_STEPS = size((32, 3), (4, 1))


def rate(moments):
    """Microbatches a second between the first commit and the last."""
    return MICROBATCHES * (len(moments) - 1) / (moments[-1] - moments[0])


def hosted(peer):
    """Waits until a peer has joined, and gives its stage."""
    return peer.wait("joined")[0]["span"][0]


def until(steps, seconds):
    """Microbatches a second of the steps up to the first that ended after `seconds`."""
    ends = itertools.accumulate(steps)
    count, end = next((count, end) for count, end in enumerate(ends, 1) if end >= seconds)
    return count * MICROBATCHES / end


def crowd(shoal):
    """Joins newcomers to a training swarm at once."""
    model, run = run_of(STAGES, STEPS, MICROBATCHES)
    with shoal.folder(model, run) as folder:
        peers = started(shoal, folder, ["auto:1"] * BEFORE, [WAIT] * BEFORE, [])
        with killed_in_the_end(peers):
            stages = [hosted(peer) for peer in peers]
            peers[0].steps(3)
            before = peers[0].steps(WINDOW)
            came = time.monotonic()
            for index in range(BEFORE, BEFORE + CROWD):
                peers.append(Peer.of_shoal(shoal, folder, index, [
                    "join", f"@{folder}/address", "--stage", "auto:1", "--slow-down", str(WAIT)]))
            stages += [hosted(peer) for peer in peers[BEFORE:]]
            served = max(peer.wait("serving")[1] for peer in peers[BEFORE:])
            waited = served - before[-1]
            # Reads the events since; each has the seconds of its step. Members count before they serve.
            steps, full = [], 0
            while full < 3 * WINDOW or sum(steps) < waited:
                event, _ = peers[0].wait("committed")
                full += event["peers"] == BEFORE + CROWD
                steps.append(event["seconds"])
            meanwhile = until(steps, waited)
            after = MICROBATCHES * WINDOW / sum(steps[-WINDOW:])
    counts = [stages.count(stage) for stage in range(STAGES)]
    return [
        ["replicas of each stage after", ", ".join(map(str, counts))],
        ["from their start until all serve", f"{served - came:.1f} s"],
        ["microbatches a second before", f"{rate(before):.1f}"],
        ["in the steps until all serve", f"{meanwhile:.1f}"],
        ["after", f"{after:.1f}"],
    ]


def many(shoal):
    """Starts many processes at once."""
    model, run = run_of(STAGES, MANY_STEPS, MICROBATCHES)
    with shoal.folder(model, run) as folder:
        begun = time.monotonic()
        peers = started(shoal, folder, ["auto:1"] * MANY, [WAIT] * MANY, [])
        with killed_in_the_end(peers):
            joined = [peer.wait("joined")[1] - begun for peer in peers]
            event, committed = peers[0].wait("committed")
            lost = MANY - event["peers"]
    return [
        ["from the start of the first until all are members", f"{max(joined):.1f} s"],
        ["until the first step is committed", f"{committed - begun:.1f} s"],
        ["lost", str(lost)],
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    line = machines.line(machines.describe(sys.executable))
    table.show(
        f"{CROWD} processes join {BEFORE} that train, at once",
        f"{STAGES} stages, {MICROBATCHES} microbatches a step, passes wait {WAIT} ms. {line}.",
        ["what", "measured"],
        crowd(shoal),
    )
    table.show(
        f"{MANY} processes start at once",
        f"{STAGES} stages; each is a process on the same two cores.",
        ["what", "measured"],
        many(shoal),
    )


if __name__ == "__main__":
    main()
