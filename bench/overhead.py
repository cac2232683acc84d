"""Measures the cost of exactly-once in a run without deaths: Shoal beside a driver that moves the same tensors
over the same links through the same engine, without claims, log and commits.

    make bench-overhead

Two processes with a stage and a thread each run on loopback, in alternated pairs. The measurements are the
processor seconds of both processes and the time, from one end of a step to another. A second table compares the
largest output log with its formula.
"""

import argparse
import contextlib
import math
import os
import re
import statistics
import sys
import threading
import urllib.request

import machine as machines
import table
from model import MEDIUM, SMALL
from peer import Peer
from shoal_run import Shoal
from sizes import size

MICROBATCHES = 16
# The work of the ledger does not depend on the size of a microbatch, so the table has two models. Of each: the steps
# of warm-up, and the measured steps.
MODELS = size({SMALL: (4, 12), MEDIUM: (2, 3)}, {SMALL: (1, 2)})
GOAL = 1.02
# Bytes of a number of an activation in f32, and of a label.
NUMBER, LABEL = 4, 4


@contextlib.contextmanager
def killed_in_the_end(peers):
    """Kills the peers that live at the end of the block."""
    try:
        yield peers
    finally:
        for peer in peers:
            if peer.process.poll() is None:
                peer.kill()


def with_ledger(shoal, folder, flags=()):
    """Two peers of a run."""
    first = Peer.of_shoal(shoal, folder, 0, [
        "start", "run.toml", "--address-file", "address", "--wait-for", "2", "--out", "out",
        "--stage", "0", *flags])
    return [first, Peer.of_shoal(shoal, folder, 1, ["join", f"@{folder}/address", "--stage", "1"])]


def without_ledger(bare, folder):
    """Two processes of the bare driver."""
    first = Peer(folder, 0, [bare, "run.toml"])
    address = first.wait("listening")[0]["address"]
    return [first, Peer(folder, 1, [bare, "run.toml", address])]


def cost(model, peers):
    """Processor seconds and seconds for a token, and the loss of the last step."""
    warm, measured = MODELS[model]
    with killed_in_the_end(peers):
        begun, _ = [peer.steps(warm)[-1] for peer in peers]
        before = sum(peer.processor_seconds() for peer in peers)
        (last, ended), _ = [
            [peer.wait("committed") for _ in range(measured)][-1] for peer in peers]
        after = sum(peer.processor_seconds() for peer in peers)
    tokens = measured * model.tokens_per_step()
    return (after - before) / tokens, (ended - begun) / tokens, last["loss"]


def pair(model, shoal, bare, swapped):
    """One measurement of each side, in this order or the other."""
    steps = sum(MODELS[model]) + 1
    run = {"stages": 2, "steps": steps, "microbatches": MICROBATCHES, "dtype": "f32"}
    costs = {}
    for which in ("bare", "shoal") if swapped else ("shoal", "bare"):
        with shoal.folder(model, run) as folder:
            peers = with_ledger(shoal, folder) if which == "shoal" else without_ledger(bare, folder)
            costs[which] = cost(model, peers)
    losses = [cost[2] for cost in costs.values()]
    assert math.isclose(*losses, abs_tol=1e-6), f"the losses differ: {losses}"
    return costs


def log_peak(shoal):
    """The largest output log of the first stage and its formula, in bytes."""
    run = {"stages": 2, "steps": 6, "microbatches": MICROBATCHES, "dtype": "f32"}
    address = "127.0.0.1:17411"
    seen, done = [0.0], threading.Event()

    def look():
        while not done.wait(0.005):
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=1) as answer:
                    found = re.search(
                        r"^shoal_output_log_bytes\S* (\S+)$", answer.read().decode(), re.M)
                    seen.append(float(found[1]))

    with shoal.folder(SMALL, run) as folder:
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            with killed_in_the_end(
                with_ledger(shoal, folder, ["--metrics", address])) as peers:
                peers[0].steps(5)
        finally:
            done.set()
            watcher.join()
    tokens = SMALL.tokens_per_step()
    return max(seen), tokens * (SMALL.hidden * NUMBER + LABEL)


def compare(model, shoal, bare, pairs):
    """Measures both sides in turns, and prints their table."""
    pairs = [pair(model, shoal, bare, index % 2) for index in range(pairs)]
    rows = []
    for name, index in (("processor", 0), ("time", 1)):
        of = {which: [one[which][index] for one in pairs] for which in ("shoal", "bare")}
        ratio = statistics.median(one["shoal"][index] / one["bare"][index] for one in pairs)
        rows.append([
            name,
            *(f"{statistics.median(of[which]) * 1e6:.1f} us" for which in ("shoal", "bare")),
            f"{ratio:.3f}",
            f"{'met' if ratio <= GOAL else 'NOT met'} (at most {GOAL})",
        ])
    table.show(
        "The cost of exactly-once in a run without deaths",
        f"Two stages of one peer each, one thread each, {MICROBATCHES} microbatches; "
        f"{model.describe()}; {machines.line(machines.describe(sys.executable))}. Medians of "
        f"{len(pairs)} alternated pairs, per token; the ratio is the median of the pairs' ratios.",
        ["what", "with ledger", "bare driver", "ratio", "goal"],
        rows,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--bare", required=True, help="the node's example bare_driver")
    parser.add_argument("--pairs", type=int, default=size(10, 1), help="alternated pairs")
    options = parser.parse_args()
    shoal = Shoal(options.shoal)
    for model in MODELS:
        compare(model, shoal, os.path.abspath(options.bare), options.pairs)
    peak, formula = log_peak(shoal)
    table.show(
        "The largest output log of a first stage",
        "Sampled while the smaller model trains. The formula: microbatches, times the bytes that each sends on.",
        ["largest", "formula", "share"],
        [[table.megabytes(peak), table.megabytes(formula), f"{peak / formula:.3f}"]],
    )


if __name__ == "__main__":
    main()
