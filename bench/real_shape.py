"""Table of a real model's shape: Shoal's engine beside transformers, eager, and beside PEFT, in bf16.

The shape is that of SmolLM2-135M (config.json on the Hugging Face Hub): 30 layers, 49,152 tokens, tied embedding.
Where all weights are trained, both sides keep weights and moments in f32 and compute in bf16. Where adapters are, both
keep the frozen weights in bf16.
"""

import dataclasses
import json
import statistics
import sys

import table
from machine import line as machine_line
from model import Model
from sizes import size
from torch_llama import LORA_RANK
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


# By the contender's name: PyTorch's variant of the model, and the rank of Shoal's adapters.
CONTENDERS = {"transformers": ("mixed", None), "PEFT": ("adapted", LORA_RANK)}


def measure(tools, machine):
    """Measures, prints the table and gives its numbers. `tools` has the paths of the programs."""
    measured = {name: compare(tools, name) for name in CONTENDERS}
    report(measured, machine)
    return {"shape": dataclasses.asdict(SHAPE), "measured": measured}


def compare(tools, contender):
    """Rates and peaks of Shoal and of the contender."""
    variant, rank = CONTENDERS[contender]
    described = {**dataclasses.asdict(SHAPE), "device": "cpu", "threads": 1, "text": tools.text}
    ours = json.dumps({**described, "lora_rank": rank})
    workers = {
        "Shoal": Worker([tools.train_rounds, ours]),
        contender: Worker([sys.executable, f"{FOLDER}/torch_train.py", json.dumps(described)]),
    }
    order = {"dtype": "bf16", "microbatches": MICROBATCHES, "steps": STEPS}
    orders = {"Shoal": order, contender: {**order, "variant": variant}}
    with closing(workers.values()):
        for name, worker in workers.items():
            worker.ask(**orders[name])
        ask = {
            name: lambda name=name: rate_of(workers[name].ask(**orders[name])) for name in workers
        }
        rates = take_turns(ask, ROUNDS)
        peaks = {name: peak_memory(worker.process.pid) for name, worker in workers.items()}
    return {"rates": rates, "peaks": peaks}


def rate_of(answer):
    return answer["tokens"] / answer["seconds"]


def peak_memory(process):
    """The most resident bytes that a process had."""
    with open(f"/proc/{process}/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def report(measured, machine):
    rows, goals = [], []
    for contender, (_, rank) in CONTENDERS.items():
        rates, peaks = measured[contender]["rates"], measured[contender]["peaks"]
        speed = ratio(rates["Shoal"], rates[contender])
        memory = peaks["Shoal"] / peaks[contender]
        trained = "all weights" if rank is None else f"adapters of rank {rank}"
        for name in rates:
            rate = f"{statistics.median(rates[name]):.0f}"
            rows.append([name, trained, rate, table.megabytes(peaks[name])])
        rows.append([f"Shoal to {contender}", "", table.times(speed), table.times(memory)])
        goals.append(
            f"beside {contender} at least 1.0x the tokens {table.goal(speed, 1.0)}, at most 1.0x the memory "
            f"{'met' if memory <= 1.0 else 'NOT met'}"
        )
    notes = (
        f"{SHAPE.describe()}, {MICROBATCHES} microbatches, bf16; trained weights and their moments in f32, frozen ones in "
        f"bf16. One thread each, {machine_line(machine)}. Tokens per second: median of {ROUNDS} alternated rounds. Peak: "
        f"resident memory of the whole process. Goals: {'; '.join(goals)}."
    )
    table.show("A real model's shape", notes, ["side", "trained", "tokens/s", "peak memory"], rows)
