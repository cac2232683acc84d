"""Measures the speed and the bytes of virtual workers over emulated links, beside a swarm that syncs in every step.

    python bench/syncs.py --shoal target/release/shoal --network target/release/examples/emulated_network \
        --hivemind bench/results/tools/hivemind

Two peers with one thread each have the whole model. Either they share the microbatches of every step, and their
all-reduce follows it; or each does one worker, and they sync after so many steps of as many tokens. A share is of the
tokens a second of the same mode on loopback. Bytes are all that both peers sent but for checkpoints, over all tokens.
hivemind's Optimizer averages the weights of two peers after as many local steps, while these go on; its bytes are those of
packets. Needs root, /dev/net/tun and `ip`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys

import emulated
import machine as machines
import table
from model import Model
from shoal_run import SKIPPED_STEPS, Shoal
from sizes import size

PEERS = 2
MICROBATCHES = 8
MODEL = Model(hidden=size(128, 64), layers=size(4, 2), heads=4, intermediate=size(352, 64), context=size(128, 32),
              batch=2 * MICROBATCHES)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Steps between syncs, the precision of a worker's delta, and the steps that it makes while a sync travels."""

    every: int
    codec: str
    overlap: int = 0

    def __str__(self):
        return f"{self.every}, {self.codec}" + (f", overlap {self.overlap}" if self.overlap else "")


# Without a mode peers sync in every step.
MODES = size(
    [None, Mode(10, "f32"), Mode(30, "int4"), Mode(30, "int4", 10), Mode(100, "f32"), Mode(100, "int4"),
     Mode(100, "int2")],
    [None, Mode(2, "int4"), Mode(2, "int4", 1)],
)
# Steps between averages of hivemind's, and their precision.
AVERAGES = size([(100, "NoCompression"), (100, "Float16Compression")], [(50, "Float16Compression")])
RATES = size([None, 100, 20], [None, 100])  # Mbit/s; the first is loopback
DELAY = 50  # ms each way
# The goals at the most steps between syncs: how many times fewer bytes, and the share on the slowest link.
FEWER, SHARE = 100, 0.9


def run(shoal, mode, inside):
    """The outcome of a run of a few steps, or of a few syncs."""
    common = {"machines": inside, "replicas": PEERS, "stages": 1, "dtype": "f32"}
    if mode is None:
        steps = size(20, 2) + SKIPPED_STEPS
        return shoal.swarm(MODEL, microbatches=MICROBATCHES, steps=steps, **common)
    syncs = size(max(2, 60 // mode.every), 1) + SKIPPED_STEPS
    outer = (f'\n[outer]\nworkers = {PEERS}\nevery = {mode.every}\ncodec = "{mode.codec}"\n'
             f"overlap = {mode.overlap}\n")
    model = dataclasses.replace(MODEL, batch=MODEL.batch // PEERS)
    return shoal.swarm(model, microbatches=MICROBATCHES // PEERS, steps=syncs * mode.every, more=outer, **common)


def bytes_per_token(outcome):
    if isinstance(outcome, Theirs):
        return outcome.sent / outcome.tokens
    sent = [count for of_peer in outcome.sent for kind, count in of_peer.items() if kind != "file"]
    return sum(sent) / outcome.tokens


@dataclasses.dataclass(frozen=True)
class Theirs:
    """The outcome of hivemind's peers."""

    tokens: int
    seconds: float
    sent: int

    def rate(self):
        return self.tokens / self.seconds


def run_hivemind(folder, every, compression, inside):
    """The outcome of a few averages of as many peers as ours, of a model with the same shape."""
    model = dataclasses.replace(MODEL, batch=MODEL.batch // PEERS)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hivemind_worker.py")
    env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    processes, addresses = [], None
    with contextlib.ExitStack() as stack:
        for rank in range(PEERS):
            prefix, address = inside[rank] if inside else ([], "127.0.0.1")
            wanted = {"model": dataclasses.asdict(model), "peers": PEERS, "every": every, "rank": rank, "address": address,
                      "first": rank == 0, "compression": compression, "matchmaking": 2.0, "skipped": size(2, 1),
                      "averages": size(4, 1)}
            process = subprocess.Popen([*prefix, sys.executable, script, json.dumps(wanted)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
                                       start_new_session=True)
            stack.callback(process.wait)
            # With its daemons.
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            addresses = addresses or process.stdout.readline()
            print(addresses.strip(), file=process.stdin, flush=True)
            processes.append(process)
        lines = [process.stdout.readline() for process in processes]
        if not all(lines):
            sys.exit("a peer of hivemind's ended without an answer")
        answers = [json.loads(line) for line in lines]
    sent = [answer["sent"] for answer in answers]
    return Theirs(sum(answer["tokens"] for answer in answers), max(answer["seconds"] for answer in answers),
                  sum(sent) if inside else max(sent))


def measure(options):
    shoal = Shoal(options.shoal)
    rows, together, speeds = [], None, {}
    theirs = AVERAGES if options.hivemind else []
    for rate in RATES:
        for mode in [*MODES, *theirs]:
            link = {"delay_ms": DELAY, "queue_ms": 50}
            ends = [{"up_mbit": rate}] * PEERS
            with emulated.machines(options.network, ends, link) if rate else contextlib.nullcontext() as inside:
                if isinstance(mode, tuple):
                    outcome = run_hivemind(options.hivemind, *mode, inside)
                else:
                    outcome = run(shoal, mode, inside)
            together = together or outcome
            share = outcome.rate() / speeds.setdefault(mode, outcome.rate())
            fewer = bytes_per_token(together) / bytes_per_token(outcome)
            judged = ""
            if isinstance(mode, Mode) and mode.every == 100:
                goals = [fewer >= FEWER] + ([share >= SHARE] if rate == RATES[-1] else [])
                judged = "met" if all(goals) else "NOT met"
            name = "hivemind, {}, {}".format(*mode) if isinstance(mode, tuple) else str(mode or 1)
            rows.append([
                "loopback" if rate is None else f"{rate} Mbit/s", name, f"{outcome.rate():.0f}", f"{share:.3f}",
                f"{bytes_per_token(outcome):.1f}", f"{fewer:.0f}", judged,
            ])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--network", required=True, help="the example emulated_network")
    parser.add_argument("--hivemind", help="a folder with hivemind")
    options = parser.parse_args()
    table.show(
        "Virtual workers over emulated links",
        f"Hidden {MODEL.hidden}, {MODEL.layers} layers, {PEERS} peers, {2 * DELAY} ms round trip; times fewer bytes than in "
        f"the first row. Goals at 100 steps: {FEWER} times fewer; a share of {SHARE} on the slowest link. "
        f"{machines.line(machines.describe(sys.executable))}.",
        ["link", "steps between syncs", "tokens/s", "of loopback", "bytes a token", "times fewer", "goal"],
        measure(options),
    )


if __name__ == "__main__":
    main()
