"""Table of a real model's shape: Shoal's engine beside transformers, eager, full training in bf16.

The shape is that of SmolLM2-135M (config.json on the Hugging Face Hub): 30 layers, 49,152 tokens, tied embedding.
Both sides keep weights and moments in f32 and compute in bf16.
"""

import dataclasses
import json
import statistics
import sys

import table
from machine import line as machine_line
from model import Model
from sizes import size
from worker import FOLDER, Worker, closing, ratio, take_turns

SHAPE = size(
    Model(
        hidden=576, layers=30, heads=9, key_value_heads=3, intermediate=1536, context=512, batch=2,
        vocabulary=49_152, tied=True,
    ),
    Model(
        hidden=64, layers=2, heads=4, key_value_heads=2, intermediate=128, context=32, batch=2,
        vocabulary=1_000, tied=True,
    ),
)
MICROBATCHES = 2
STEPS = 1
ROUNDS = size(5, 1)


def measure(tools, machine):
    """Measures, prints the table and gives its numbers. `tools` has the paths of the programs."""
    described = json.dumps({**dataclasses.asdict(SHAPE), "device": "cpu", "threads": 1, "text": tools.text})
    workers = {
        "Shoal": Worker([tools.train_rounds, described]),
        "transformers": Worker([sys.executable, f"{FOLDER}/torch_train.py", described]),
    }
    orders = {
        "Shoal": {"dtype": "bf16", "microbatches": MICROBATCHES, "steps": STEPS},
        "transformers": {
            "dtype": "bf16", "variant": "mixed", "microbatches": MICROBATCHES, "steps": STEPS,
        },
    }
    with closing(workers.values()):
        for name, worker in workers.items():
            worker.ask(**orders[name])
        ask = {
            name: lambda name=name: rate_of(workers[name].ask(**orders[name])) for name in workers
        }
        rates = take_turns(ask, ROUNDS)
        peaks = {name: peak_memory(worker.process.pid) for name, worker in workers.items()}
    report(rates, peaks, machine)
    return {"shape": dataclasses.asdict(SHAPE), "rates": rates, "peaks": peaks}


def rate_of(answer):
    return answer["tokens"] / answer["seconds"]


def peak_memory(process):
    """The most resident bytes that a process had."""
    with open(f"/proc/{process}/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def report(rates, peaks, machine):
    speed = ratio(rates["Shoal"], rates["transformers"])
    memory = peaks["Shoal"] / peaks["transformers"]
    rows = [
        [name, f"{statistics.median(rates[name]):.0f}", table.megabytes(peaks[name])] for name in rates
    ]
    rows.append(["Shoal to transformers", table.times(speed), table.times(memory)])
    notes = (
        f"{SHAPE.describe()}, {MICROBATCHES} microbatches, bf16 with weights and moments in f32, one thread each, "
        f"{machine_line(machine)}. Tokens per second: median of {ROUNDS} alternated rounds. Peak: resident memory "
        f"of the whole process. Goals: at least 1.0x the tokens {table.goal(speed, 1.0)}, at most 1.0x the memory "
        f"{'met' if memory <= 1.0 else 'NOT met'}."
    )
    table.show("A real model's shape", notes, ["side", "tokens/s", "peak memory"], rows)
