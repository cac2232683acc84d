"""Table of the peak memory of each peer of a swarm, beside the least that it needs."""

import os
import subprocess

import table
from machine import line as machine_line
from model import SMALL

# Weights 4, Adam's moments 8, gradient 4, accumulator 8, the round's result 4.
BYTES_PER_PARAMETER = 4 + 8 + 4 + 8 + 4


def measure(swarm, idle_command, *, dtype, stages, microbatches, machine):
    """Prints the table of a finished run, and gives its numbers."""
    idle = idle_peak(idle_command)
    samples = SMALL.batch // microbatches
    peers = [
        floor(stage, stages, samples, dtype) | {"libtorch": idle, "peak": peak}
        for stage, peak in enumerate(swarm.peak)
    ]
    for peer in peers:
        peer["floor"] = peer["state"] + peer["activations"] + peer["log"] + peer["libtorch"]
    rows = [
        [
            f"stage {stage}",
            table.megabytes(peer["peak"]),
            table.megabytes(peer["floor"]),
            *(table.megabytes(peer[part]) for part in ("libtorch", "state", "activations", "log")),
            table.times(peer["peak"] / peer["floor"]),
        ]
        for stage, peer in enumerate(peers)
    ]
    notes = (
        f"Peak resident memory of each peer of the swarm above, {dtype}, {microbatches} "
        f"microbatches, {machine_line(machine)}. The floor: a process that only loads libtorch and "
        f"ends; {BYTES_PER_PARAMETER} bytes for each of the stage's parameters (weights 4, Adam 8, "
        "gradient 4, accumulator 8, result 4); the graphs of as many microbatches as the fewest "
        "that keep a pipeline busy (2 at stage 0, 1 at stage 1); the output log."
    )
    header = ["peer", "peak", "floor", "libtorch", "state", "graphs", "log", "peak to floor"]
    table.show(f"Memory, {dtype}", notes, header, rows)
    return {"microbatches": microbatches, "peers": peers}


def floor(stage, stages, samples, dtype):
    """The least memory that a peer of this stage needs beside libtorch, in bytes."""
    size = {"f32": 4, "bf16": 2}[dtype]
    tokens = samples * SMALL.context
    # Kept for the backward pass, per token and layer: inputs and outputs of both norms, queries, keys and
    # values, the output of attention; gate, up and their product.
    kept = SMALL.layers // stages * (8 * SMALL.hidden + 3 * SMALL.intermediate) * size
    if stage == stages - 1:
        # Input and output of the last norm; logarithms of the probabilities, in f32.
        kept += 2 * SMALL.hidden * size + SMALL.vocabulary * 4
    return {
        "state": SMALL.stage_parameters(stages)[stage] * BYTES_PER_PARAMETER,
        "activations": (stages - stage) * tokens * kept,
        "log": SMALL.tokens_per_step() * SMALL.hidden * size,
    }


def idle_peak(command):
    """Peak memory of a process that only loads libtorch, in bytes."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}"
    return usage.ru_maxrss * 1024
