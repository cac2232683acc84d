"""Measures the training of a mixture of experts: Shoal's engine beside transformers, in one process of one thread each.

    make bench-mixture
    make bench-mixture ARGS='--layers 4'

The shape is that of Qwen3-MoE, small: 128M of 496M parameters work on a token, or fewer of fewer layers. First every way in which transformers can
compute experts trains one layer; the fastest one competes. The state of either side takes gigabytes, so only one process runs
at a time, and each round starts both anew, in turns. Nothing of the loading is in the times.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys

import machine as machines
import table
from model import Model
from real_shape import peak_memory, rate_of
from sizes import SMOKE, size
from torch_mixture import IMPLEMENTATIONS
from worker import FOLDER, Worker, closing, ratio, take_turns

ROOT = pathlib.Path(FOLDER).parent
SHAPE = size(
    Model(
        hidden=576, layers=16, heads=9, key_value_heads=3, intermediate=512, experts=32, experts_per_token=6,
        context=1024, batch=2, vocabulary=49_152, tied=True, query_key_norm=True,
    ),
    Model(
        hidden=64, layers=2, heads=4, key_value_heads=2, intermediate=32, experts=8, experts_per_token=2,
        context=32, batch=2, vocabulary=1_000, tied=True, query_key_norm=True,
    ),
)
# One layer, few enough tokens that copies of the experts of every token fit into memory.
PROBE = dataclasses.replace(SHAPE, layers=1, vocabulary=1_024, context=size(192, 32), batch=1)
MICROBATCHES = 2
STEPS = 1
ROUNDS = size(2, 1)
# Of transformers: weights in f32 with the products that autocast reaches in bf16, or all of it in bf16.
VARIANTS = {"f32": ("mixture",), "bf16": ("mixed-mixture", "mixture")}
# Without them a product in bf16 is slower than one in f32, on both sides.
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
# Weights, moments, sums and gradients of Shoal, the larger side.
STATE_PER_PARAMETER = 28


def described(shape, tools):
    return json.dumps({**dataclasses.asdict(shape), "device": "cpu", "threads": 1, "text": tools.text})


def start(side, shape, tools):
    if side == "Shoal":
        return Worker([tools.train_rounds, described(shape, tools)], environment={"SHOAL_MKL_AVX512": "0"})
    return Worker([sys.executable, f"{FOLDER}/torch_train.py", described(shape, tools)])


def probe(tools, dtype):
    """Seconds of a step of one layer, by the variant of transformers and its way to compute experts."""
    seconds = {}
    with closing([start("transformers", PROBE, tools)]) as [worker]:
        for variant in VARIANTS[dtype]:
            for experts in IMPLEMENTATIONS:
                order = {"dtype": dtype, "microbatches": 1, "variant": variant, "experts": experts}
                worker.ask(**order, steps=1)
                seconds[variant, experts] = worker.ask(**order, steps=size(2, 1))["seconds"]
    return seconds


def measure(side, dtype, more, tools, shape):
    """Tokens a second and the peak memory of a process of its own."""
    order = {"dtype": dtype, "microbatches": MICROBATCHES, "steps": STEPS, **more}
    with closing([start(side, shape, tools)]) as [worker]:
        worker.ask(**order)
        rate = rate_of(worker.ask(**order))
        return rate, peak_memory(worker.process.pid)


def compare(tools, dtype, shape):
    probes = probe(tools, dtype)
    variant, experts = min(probes, key=probes.get)
    more = {"Shoal": {}, "transformers": {"variant": variant, "experts": experts}}
    sides = {side: lambda side=side: measure(side, dtype, more[side], tools, shape) for side in more}
    found = take_turns(sides, tools.rounds)
    return {
        "dtype": dtype,
        "probes": {" ".join(key): value for key, value in probes.items()},
        "chosen": (variant, experts),
        "rates": {side: [rate for rate, _ in results] for side, results in found.items()},
        "peaks": {side: max(peak for _, peak in results) for side, results in found.items()},
    }


def check_memory(shape):
    """Refuses to measure where the state does not fit: the machine would stop another process."""
    needs = STATE_PER_PARAMETER * shape.parameters() + (2 << 30)
    with open("/proc/meminfo", encoding="utf-8") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    if free < needs:
        raise SystemExit(f"the mixture takes {table.megabytes(needs)}, and {table.megabytes(free)} of memory are free")


def report(measured, machine, shape, rounds):
    rows, goals = [], []
    for one in measured:
        rates, peaks = one["rates"], one["peaks"]
        speed, memory = ratio(rates["Shoal"], rates["transformers"]), peaks["Shoal"] / peaks["transformers"]
        for side in rates:
            name = side if side == "Shoal" else f"{side}, {one['chosen'][1]}"
            rows.append([one["dtype"], name, f"{statistics.median(rates[side]):.0f}", table.megabytes(peaks[side])])
        rows.append([one["dtype"], "Shoal to transformers", table.times(speed), table.times(memory)])
        goals.append(
            f"{one['dtype']} at least 1.0x the tokens {table.goal(speed, 1.0)}, at most 1.0x the memory "
            f"{'met' if memory <= 1.0 else 'NOT met'}"
        )
        layers = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in one["probes"].items())
        print(f"transformers in {one['dtype']}, {PROBE.tokens_per_step()} tokens through one layer: {layers}", flush=True)
    notes = (
        f"{shape.describe()}, {MICROBATCHES} microbatches. One thread each, {machines.line(machine)}. Tokens per second: "
        f"median of {rounds} alternated rounds. Peak: resident memory of the whole process. Goals: {'; '.join(goals)}."
    )
    table.show("A mixture of experts", notes, ["dtype", "side", "tokens/s", "peak memory"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--train-rounds", default=str(ROOT / "target/release/examples/train_rounds"))
    parser.add_argument("--text", required=True, help="the text to train on")
    parser.add_argument("--dtypes", help="f32, bf16 or f32,bf16; without it bf16 only where the processor has it")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    tools = parser.parse_args()
    shape = dataclasses.replace(SHAPE, layers=tools.layers)
    machine = machines.describe(sys.executable)
    has_bf16 = not BF16_FLAGS.isdisjoint(machine["extensions"])
    dtypes = (tools.dtypes or ("f32,bf16" if has_bf16 or SMOKE else "f32")).split(",")
    if "bf16" not in dtypes and not has_bf16:
        print("bf16 is not measured: this processor has no products in bf16 (--dtypes f32,bf16 measures it still)")
    check_memory(shape)
    report([compare(tools, dtype, shape) for dtype in dtypes], machine, shape, tools.rounds)


if __name__ == "__main__":
    main()
