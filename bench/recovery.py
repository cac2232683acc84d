"""Kills a peer and adds one while a swarm trains, then kills the peer that keeps the run: how long
until it shows, and until speed is back.

    make bench-recovery

Two stages of two peers each, one thread each, on loopback; for the keeper's death three of them are
anchors. What is timed are the events of a peer that lives on, as they come.
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

STEPS = 400
# Steps whose speed is the speed before and, in the end, after.
WINDOW = 8


def rate(moments):
    """Steps per second between the first and the last."""
    return (len(moments) - 1) / (moments[-1] - moments[0])


@contextlib.contextmanager
def swarm(shoal, flags=()):
    """A run's first peer, three others with further flags, and how a newcomer joins a stage.
    Whoever lives at the end is killed."""
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
    """One death and one newcomer, in seconds."""
    with swarm(shoal) as (first, others, joins):
        first.steps(4)
        before = rate(first.steps(WINDOW))
        killed = others[2].kill()
        _, lost = first.wait("lost")
        after = first.steps(3 * WINDOW)
        settled = rate(after[-WINDOW:])
        # The first step from which on it goes at the speed that three peers have.
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


def keeper(shoal):
    """The death of the peer that keeps the run, in seconds."""
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
    parser.add_argument("--rounds", type=int, default=5, help="deaths and newcomers")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    rounds = [once(shoal) | {"keeper": keeper(shoal)} for _ in range(options.rounds)]
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    worst = {key: max(one[key] for one in rounds) for key in rounds[0]}
    rows = [
        ["from kill -9 until the peer is expelled", "detection"],
        ["from kill -9 until steps go at 95% of three peers' speed", "back"],
        ["from kill -9 of the keeper until the second commit under another", "keeper"],
        ["from a newcomer's start until it knows its stage", "started"],
        ["from a newcomer's start until it serves", "serving"],
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
