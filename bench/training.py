"""Table of the tokens per second of one process: Shoal's engine beside eager PyTorch."""

import dataclasses
import json
import statistics
import sys

import table
from machine import line as machine_line
from model import SMALL
from sizes import size
from worker import FOLDER, Worker, closing, ratio, take_turns

DTYPES = ("f32", "bf16")
MICROBATCHES = size((1, 2, 4, 8), (1, 2))
VARIANTS = ("plain", "transformers")
STOCK, AVX512 = "stock", "AVX-512"
ROUND_SECONDS = size(2.0, 0.1)


def measure(tools, machine):
    """Measures, prints the table and gives its numbers. `tools` has the paths of the programs."""
    described = json.dumps(
        {**dataclasses.asdict(SMALL), "device": "cpu", "threads": 1, "text": tools.text}
    )
    python = [sys.executable, f"{FOLDER}/torch_train.py", described]
    workers = {
        ("shoal", STOCK): Worker([tools.train_rounds, described]),
        ("shoal", AVX512): Worker([tools.train_rounds, described], environment={"SHOAL_MKL_AVX512": "1"}),
        ("torch", STOCK): Worker(python),
        ("torch", AVX512): Worker(python, preload=tools.preload),
    }
    with closing(workers.values()):
        contenders, chosen = prepare(workers)
        results = take_turns(contenders, tools.rounds)
        products = take_turns(
            {
                dispatch: lambda dispatch=dispatch: multiply(workers["torch", dispatch])
                for dispatch in (STOCK, AVX512)
            },
            tools.rounds,
        )
    cells = [cell(results, chosen, dtype, dispatch) for dtype in DTYPES for dispatch in (STOCK, AVX512)]
    gains = {
        dtype: ratio(results[dtype, AVX512, "shoal"], results[dtype, STOCK, "shoal"])
        for dtype in DTYPES
    }
    bare = {dispatch: statistics.median(flops) for dispatch, flops in products.items()}
    report(cells, gains, bare, machine)
    return {
        "model": dataclasses.asdict(SMALL),
        "threads": 1,
        "cells": cells,
        "dispatch_gain": gains,
        "matrix_product_flops": bare,
    }


def multiply(worker):
    """Speed of a bare matrix product in f32, in FLOP/s: the most that a dispatch can gain."""
    return worker.ask(product=1024, dtype="f32")["flops"]


def prepare(workers):
    """Warms up all contenders and finds the best number of microbatches of each. Gives each contender as a function
    that trains for about a round and returns tokens per second, and the numbers of microbatches."""
    contenders, chosen = {}, {}
    for dtype in DTYPES:
        for dispatch in (STOCK, AVX512):
            for side in ("shoal", *VARIANTS):
                worker = workers["shoal" if side == "shoal" else "torch", dispatch]
                order = {"dtype": dtype} if side == "shoal" else {"dtype": dtype, "variant": side}
                name = (dtype, dispatch, side)
                contenders[name], chosen[name] = contender(worker, order)
    return contenders, chosen


def contender(worker, order):
    """A contender's function, and its number of microbatches."""
    probes = {}
    for microbatches in MICROBATCHES:
        worker.ask(**order, microbatches=microbatches, steps=1)
        probes[microbatches] = rate_of(worker.ask(**order, microbatches=microbatches, steps=2))
    best = max(probes, key=probes.get)
    steps = max(1, round(ROUND_SECONDS * probes[best] / SMALL.tokens_per_step()))
    return lambda: rate_of(worker.ask(**order, microbatches=best, steps=steps)), best


def rate_of(answer):
    return answer["tokens"] / answer["seconds"]


def cell(results, chosen, dtype, dispatch):
    """A line of the table: Shoal, the faster PyTorch, and their ratio."""
    rates = {side: results[dtype, dispatch, side] for side in ("shoal", *VARIANTS)}
    medians = {side: statistics.median(values) for side, values in rates.items()}
    faster = max(VARIANTS, key=medians.get)
    return {
        "dtype": dtype,
        "dispatch": dispatch,
        "tokens_per_second": medians,
        "microbatches": {side: chosen[dtype, dispatch, side] for side in medians},
        "faster_torch": faster,
        "ratio": ratio(rates["shoal"], rates[faster]),
        "rounds": rates,
    }


def report(cells, gains, bare, machine):
    rows = [
        [
            each["dtype"],
            each["dispatch"],
            *(
                f"{table.rate(each['tokens_per_second'][side])} ({each['microbatches'][side]})"
                for side in ("shoal", *VARIANTS)
            ),
            table.times(each["ratio"]),
            table.goal(each["ratio"], 1.0),
        ]
        for each in cells
    ]
    notes = (
        f"{SMALL.describe()}. Forward, backward, accumulation, clipping by the global norm and "
        f"AdamW (PyTorch's is the fused one), one thread each, {machine_line(machine)}. Tokens "
        f"per second, median of {len(cells[0]['rounds']['shoal'])} alternated rounds; in brackets the number of "
        "microbatches of the step, the best of "
        f"{', '.join(map(str, MICROBATCHES))} for each. The ratio is Shoal to the faster of "
        "the two PyTorch models. In bf16 PyTorch keeps weights and moments in bf16, Shoal in "
        "f32. MKL's dispatch is that of the library as it comes (stock), or told to use "
        "AVX-512 on any processor: by SHOAL_MKL_AVX512 in Shoal, by an LD_PRELOAD in PyTorch."
    )
    header = ["dtype", "MKL dispatch", "Shoal", *(f"PyTorch, {v}" for v in VARIANTS), "ratio", "goal"]
    table.show("Training in one process", notes, header, rows)
    for dtype, gain in gains.items():
        wanted = f": goal {table.goal(gain, 1.5)}" if dtype == "f32" else ""
        print(f"Shoal in {dtype}, AVX-512 to stock: {table.times(gain)}{wanted}")
    print(
        f"A bare f32 product of 1024 x 1024 matrices on this processor: {bare[STOCK] / 1e9:.0f} GFLOP/s "
        f"with the stock dispatch, {bare[AVX512] / 1e9:.0f} with AVX-512."
    )
