"""Measures recovery: kills a peer of a swarm, adds one, and in another swarm kills the coordinator.

    make bench-recovery

Two stages have two peers each, with a thread each, on loopback. For the death of the coordinator three of them
are anchors. The times are those of the events of a surviving peer.
"""

import argparse
import contextlib
import itertools
import statistics
import sys

import machine as machines
import table
from model import SMALL
from peer import Peer
from shoal_run import Shoal
from sizes import size

STEPS = size(400, 100_000)
# The steps over which a speed is measured.
WINDOW = size(8, 3)


def rate(moments):
    """Steps per second between the first and the last."""
    return (len(moments) - 1) / (moments[-1] - moments[0])


@contextlib.contextmanager
def swarm(shoal, flags=()):
    """A run's first peer, three others with further flags, and a function that joins a newcomer to a stage.
    Kills the peers that live at the end."""
    run = {"stages": 2, "steps": STEPS, "microbatches": 8, "dtype": "f32"}
    with shoal.folder(SMALL, run) as folder:
        first = Peer.of_shoal(shoal, folder, 0, [
            "start", "run.toml", "--address-file", "address", "--wait-for", "4", "--out", "out",
            "--stage", "0",
        ])
        join = ["join", f"@{folder}/address"]
        others = [
            Peer.of_shoal(shoal, folder, index, [*join, "--stage", str(stage), *more])
            for index, stage, more in zip((1, 2, 3), (1, 0, 1), itertools.chain(flags, [()] * 3))
        ]
        try:
            yield first, others, lambda stage: Peer.of_shoal(
                shoal, folder, len(others) + 1, [*join, "--stage", str(stage)])
        finally:
            for peer in [first, *others]:
                if peer.process.poll() is None:
                    peer.kill()


def once(shoal):
    """Seconds of a death and of a newcomer."""
    with swarm(shoal) as (first, others, joins):
        first.steps(4)
        before = rate(first.steps(WINDOW))
        killed = others[2].kill()
        _, lost = first.wait("lost")
        after = first.steps(3 * WINDOW)
        settled = rate(after[-WINDOW:])
        # The first step at the speed of three peers.
        back = next(
            (moment for moment, later in zip(after, after[2:])
             if 2 / (later - moment) >= 0.95 * settled), after[-1])
        newcomer = joins(1)
        others.append(newcomer)
        _, joined = newcomer.wait("joined")
        _, serving = newcomer.wait("serving")
    return {
        "detection": lost - killed,
        "back": back - killed,
        "before": before,
        "after": settled,
        "started": joined - newcomer.started,
        "serving": serving - newcomer.started,
    }


def coordinator(shoal):
    """Seconds of the death of the coordinator."""
    with swarm(shoal, [["--anchor"], ["--anchor"]]) as (first, others, _):
        watched = others[2]
        first.wait("anchors")
        watched.steps(WINDOW)
        killed = first.kill()
        watched.wait("committed", killed)
        _, step = watched.wait("committed", killed)
    return step - killed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--rounds", type=int, default=size(5, 1), help="deaths and newcomers")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    rounds = [once(shoal) | {"coordinator": coordinator(shoal)} for _ in range(options.rounds)]
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    worst = {key: max(one[key] for one in rounds) for key in rounds[0]}
    rows = [
        ["from kill -9 until the peer is expelled", "detection"],
        ["from kill -9 until steps reach 95% of the speed of three peers", "back"],
        ["from kill -9 of the coordinator until the second commit under another", "coordinator"],
        ["from the start of a newcomer until it has a stage", "started"],
        ["from the start of a newcomer until it serves", "serving"],
    ]
    table.show(
        "A death and a newcomer",
        f"Two stages of two peers each, one thread each; {SMALL.describe()}; "
        f"{machines.line(machines.describe(sys.executable))}. Median and worst of "
        f"{options.rounds} runs. Steps per second: {median['before']:.2f} with four peers, "
        f"{median['after']:.2f} with three.",
        ["what", "median", "worst"],
        [[what, f"{median[key]:.2f} s", f"{worst[key]:.2f} s"] for what, key in rows],
    )


if __name__ == "__main__":
    main()
