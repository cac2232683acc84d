"""Measures training with a third of the memory that the state takes, beside training with enough of it.

    make bench-swap
    .venv/bin/python bench/swap.py --shoal target/release/shoal --peers FOLDER

Stages are swapped between memory and a file (ATOM, arXiv 2403.10504). Each row has another number of microbatches a step:
with few the disk limits the step, with many the passes hide it. The prediction is that of the two parts of a step:
passes take the longer one of their computing and their bytes over the disk's rate, and so do the updates. Both sides run
forward passes again before backward passes, as one does with large models.
DeepSpeed's ZeRO-Infinity, where it is installed, trains the same model with weights, gradients and moments on the same
disk.
"""

import argparse
import dataclasses
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import machine as machines
import table
from model import Model
from shoal_run import Shoal
from sizes import size
from worker import FOLDER

ROOT = pathlib.Path(FOLDER).parent
STAGES = size(8, 4)
# Samples of a microbatch.
SAMPLES = 2
MICROBATCHES = size((2, 6, 16), (2,))
MODEL = size(
    Model(hidden=640, layers=8, heads=10, intermediate=1728, context=128, batch=SAMPLES),
    Model(hidden=192, layers=4, heads=4, intermediate=512, context=16, batch=SAMPLES),
)
STEPS = size(6, 3)
# Weights 4, moments 8, accumulator 8 and mean gradient 4.
STATE_PER_PARAMETER = 24
# Of these an update reads the accumulator, writes and reads the mean, and reads and writes weights and moments.
UPDATE_PER_PARAMETER = 8 + 4 + 4 + 2 * (4 + 8)
SHARE = 3
PEER_LIMIT_SECONDS = 500
DISK_MEGABYTES = size(1024, 16)
BLOCK = 8 << 20
# The least share of the speed without swapping where passes hide the disk, and the largest error of the prediction.
LEAST_SHARE = 0.95
LARGEST_ERROR = 0.10
LEAST_BESIDE_PEER = 2.0


@dataclasses.dataclass
class Disk:
    """Bytes a second around the page cache."""

    read: float
    written: float


@dataclasses.dataclass
class Row:
    microbatches: int
    whole: float
    swapped: float
    predicted: float
    # Whether passes and updates take longer than their bytes, nearly.
    hidden: bool
    # Share of the time for which the engine waited.
    waited: float


def disk_rate(folder):
    """Writes and reads a file in the order in which it lies on the disk."""
    path = pathlib.Path(folder) / "disk"
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))
    count = DISK_MEGABYTES * 1_000_000 // BLOCK + 1
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    try:
        file = os.open(path, flags, 0o600)
    except OSError:
        file = os.open(path, flags & ~os.O_DIRECT, 0o600)
    try:
        written = timed(lambda at: os.pwritev(file, [block], at), count, lambda: os.fsync(file))
        read = timed(lambda at: os.preadv(file, [block], at), count, lambda: None)
    finally:
        os.close(file)
        path.unlink()
    return Disk(read, written)


def timed(move, count, settle):
    start = time.perf_counter()
    for index in range(count):
        move(index * BLOCK)
    settle()
    return count * BLOCK / (time.perf_counter() - start)


def train(shoal, microbatches, memory):
    """Trains in one process. Gives seconds of a step, and bytes read and written and seconds waited in a step."""
    model = dataclasses.replace(MODEL, batch=SAMPLES * microbatches)
    run = {"dtype": "f32", "stages": STAGES, "microbatches": microbatches, "steps": STEPS, "recompute": True}
    threads = len(os.sched_getaffinity(0))
    outcome = shoal.local(model, threads, flags=["--memory", str(memory)] if memory else [], **run)
    seconds = sorted(outcome.seconds)[len(outcome.seconds) // 2]
    return seconds, {key: value / STEPS for key, value in outcome.swapped[0].items()}, outcome.checkpoint_hash


def compare(shoal, disk, memory):
    """All rows, with the prediction from what was measured without swapping."""
    measured = []
    for microbatches in MICROBATCHES:
        whole, _, expected = train(shoal, microbatches, None)
        swapped, moved, got = train(shoal, microbatches, memory)
        if got != expected:
            raise SystemExit(f"with swapping the checkpoint is {got}, without {expected}")
        measured.append((microbatches, whole, swapped, moved))
    # A step takes update + microbatches · pass.
    (few, least, *_), (many, most, *_) = measured[0], measured[-1]
    each = (most - least) / (many - few) if many > few else 0.0
    update = max(least - few * each, 0.0)
    return [row(one, each, update, disk) for one in measured]


def row(measured, each, update, disk):
    microbatches, whole, swapped, moved = measured
    of_update = MODEL.parameters() * UPDATE_PER_PARAMETER / 2
    read, written = max(moved["read"] - of_update, 0), max(moved["written"] - of_update / 2, 0)
    passes, loads = microbatches * each, read / disk.read + written / disk.written
    updates = of_update / disk.read + of_update / 2 / disk.written
    tokens = microbatches * SAMPLES * MODEL.context
    predicted = max(passes, loads) + max(update, updates)
    return Row(microbatches, tokens / whole, tokens / swapped, tokens / predicted,
               predicted * LEAST_SHARE <= passes + update, moved["waited_seconds"] / swapped)


def peer(folder, scratch, microbatches):
    """Tokens a second of DeepSpeed; its reason where it does not train."""
    model = dataclasses.replace(MODEL, batch=SAMPLES * microbatches)
    order = {"model": dataclasses.asdict(model), "microbatches": microbatches, "steps": 1,
             "threads": len(os.sched_getaffinity(0)), "folder": str(scratch)}
    command = [sys.executable, f"{FOLDER}/swap_peer.py", folder, json.dumps(order)]
    # It compiles its access to the disk with the ninja beside it.
    environment = os.environ | {"PATH": f"{os.path.abspath(folder)}/bin:{os.environ['PATH']}"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PEER_LIMIT_SECONDS, check=False,
                               env=environment)
    except subprocess.TimeoutExpired:
        return None, f"it did not end within {PEER_LIMIT_SECONDS} s"
    lines = ended.stdout.strip().splitlines()
    if ended.returncode != 0 or not lines:
        return None, (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return json.loads(lines[-1]), None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shoal", default=str(ROOT / "target" / "release" / "shoal"))
    parser.add_argument("--peers", default="", help="a folder with DeepSpeed")
    parser.add_argument("--scratch", default=None, help="a folder on the disk to measure")
    options = parser.parse_args()
    tempfile.tempdir = options.scratch
    shoal = Shoal(options.shoal)
    # What the processor computes with stays out of the limit, as `--memory` says.
    memory = size(STATE_PER_PARAMETER * MODEL.parameters() // SHARE, 24 << 20)
    with tempfile.TemporaryDirectory(prefix="shoal-swap-") as scratch:
        disk = disk_rate(scratch)
        rows = compare(shoal, disk, memory)
        show(rows, disk, memory)
        if options.peers:
            show_beside(rows[-1], *peer(options.peers, scratch, rows[-1].microbatches))


def show(rows, disk, memory):
    cells = [[
        one.microbatches, one.microbatches * SAMPLES * MODEL.context, table.rate(one.whole), table.rate(one.swapped),
        table.times(one.swapped / one.whole), table.times(one.predicted / one.whole), f"{one.waited:.0%}",
        goal(one),
    ] for one in rows]
    table.show(
        "Stages swapped through a third of their memory",
        f"{MODEL.describe()}, in {STAGES} stages; state {table.megabytes(STATE_PER_PARAMETER * MODEL.parameters())}, "
        f"memory {table.megabytes(memory)}. Disk: {table.megabytes(disk.read)}/s read, "
        f"{table.megabytes(disk.written)}/s written. {machines.line(machines.describe(sys.executable))}",
        ["microbatches", "tokens a step", "whole, tokens/s", "swapped", "share", "predicted", "waited", "goal"],
        cells,
    )


def show_beside(one, measured, reason):
    if measured is None:
        print(f"\nDeepSpeed's ZeRO-Infinity does not train here: {reason}")
        return
    rate = measured["tokens"] / measured["seconds"]
    print(f"\nDeepSpeed {measured['version']}, ZeRO-Infinity: {table.rate(rate)} tokens/s with {one.microbatches} "
          f"microbatches, peak {table.megabytes(measured['peak'])}; Shoal {table.times(one.swapped / rate)}: "
          f"{table.goal(one.swapped / rate, LEAST_BESIDE_PEER)}")


def goal(one):
    if one.hidden:
        return table.goal(one.swapped / one.whole, LEAST_SHARE)
    off = abs(one.swapped / one.predicted - 1)
    return f"{'met' if off <= LARGEST_ERROR else 'NOT met'} (prediction off by {off:.0%}, at most {LARGEST_ERROR:.0%})"


if __name__ == "__main__":
    main()
