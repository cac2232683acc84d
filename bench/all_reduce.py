"""How long replicas take to add up their gradients on loopback: Shoal's swarm, beside gloo and hivemind.

    make bench-all-reduce

A swarm of one stage, of which every peer is a replica, trains a model of so many parameters. What is
timed of each step is from when the last microbatch was done until every replica held the result: with
packing, encryption, the proof, and the hash of the result at each. gloo encrypts nothing, hivemind does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

import machine as machines
import table
from model import Model
from shoal_run import SKIPPED_STEPS, Shoal

STEPS = 8 + SKIPPED_STEPS
# About 10 and 100 million parameters, of which hardly any takes long to compute.
MODELS = {
    10: Model(hidden=320, layers=8, heads=5, intermediate=860, context=16, batch=8),
    100: Model(hidden=1024, layers=8, heads=8, intermediate=2752, context=16, batch=8),
}
OURS = ["exact", "f32", "bf16", "int8"]
# What hivemind compresses to, and how it is called there.
THEIRS = {"f32": "NoCompression", "f16": "Float16Compression"}
# Shoal's modes, what they are held against, and how many times faster they should be.
GOALS = {"exact": ("f32", 1.5), "f32": ("f32", 1.5), "bf16": ("f16", 2.5), "int8": ("f16", 2.5)}


def shoal_seconds(shoal, model, peers, mode):
    outcome = shoal.swarm(
        model, replicas=peers, stages=1, microbatches=8, steps=STEPS, dtype="f32", all_reduce=mode
    )
    sent = sum(peer.get("tensor", 0) for peer in outcome.sent) / STEPS
    return statistics.median(outcome.all_reduce_seconds), sent


def peers_seconds(what, folder, *arguments):
    """Of another, which prints a list of seconds."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, os.path.join(here, "all_reduce_peers.py"), what, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if not lines:
        raise SystemExit(f"{what} failed: {done.stderr[-2000:]}")
    return statistics.median(json.loads(lines[-1]))


def rows(options, millions, peers):
    model = MODELS[millions]
    count = model.parameters()
    gloo = peers_seconds("gloo", "", peers, count)
    theirs = {name: peers_seconds("hivemind", options.hivemind, peers, count, called)
              for name, called in THEIRS.items()} if options.hivemind else {}
    shoal = Shoal(options.shoal)
    found = []
    for mode in OURS:
        seconds, sent = shoal_seconds(shoal, model, peers, mode)
        name, goal = GOALS[mode]
        beside = theirs.get(name)
        found.append([
            f"{count / 1e6:.1f}M, {peers}", mode, f"{1e3 * seconds:.0f} ms", f"{sent / 1e6:.0f} MB",
            f"{sent / seconds / 1e6:.0f} MB/s", f"{gloo / seconds:.2f}x",
            f"{beside / seconds:.2f}x {name}" if beside else "",
            "" if not beside else "met" if beside / seconds >= goal else f"NOT met ({goal}x)",
        ])
    found.append([f"{count / 1e6:.1f}M, {peers}", "gloo, f32", f"{1e3 * gloo:.0f} ms"] + [""] * 5)
    found += [[f"{count / 1e6:.1f}M, {peers}", f"hivemind, {name}", f"{1e3 * seconds:.0f} ms"] + [""] * 5
              for name, seconds in theirs.items()]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--hivemind", help="a folder with hivemind")
    parser.add_argument("--only", help="MILLIONS,PEERS")
    options = parser.parse_args()
    cases = [(10, 2), (10, 4), (10, 8), (100, 2), (100, 4)]
    if options.only:
        cases = [tuple(int(number) for number in options.only.split(","))]
    table.show(
        "All-reduce on loopback",
        f"Seconds are medians of {STEPS - SKIPPED_STEPS} rounds; the bytes are those of all peers in one "
        f"of them. One thread each. {machines.line(machines.describe(sys.executable))}.",
        ["values, peers", "mode", "time", "sent", "sent by all", "of gloo's speed", "of hivemind's",
         "goal"],
        [row for case in cases for row in rows(options, *case)],
    )


if __name__ == "__main__":
    main()
