"""Measures Shoal beside PyTorch, prints the tables and writes results/latest.json.

`make bench` builds the programs and calls this script.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time

import data_plane
import machine as machines
import memory
import real_shape
import swarm
import training
from model import SMALL
from shoal_run import Shoal
from sizes import size

TABLES = ("training", "real", "swarm", "data")
# f32 comes first: the goals are for f32.
SWARM_DTYPES = size(("f32", "bf16"), ("f32",))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--train-rounds", required=True, help="the engine's example")
    parser.add_argument("--preload", required=True, help="the library that makes PyTorch use AVX-512")
    parser.add_argument("--text", required=True, help="the text to train on")
    parser.add_argument("--codec-speed", required=True, help="the protocol's example")
    parser.add_argument("--speed", required=True, help="the protocol's example transport_speed")
    parser.add_argument("--plain", required=True, help="the protocol's example plain_speed")
    parser.add_argument("--arithmetic", required=True, help="the engine's example round_speed")
    parser.add_argument("--only", choices=TABLES, help="print only these tables")
    parser.add_argument("--rounds", type=int, default=size(5, 1), help="alternated rounds of each table")
    return parser.parse_args()


def main():
    tools = arguments()
    start = time.monotonic()
    # PyTorch has MKL's stock dispatch, so Shoal is measured with the same unless a table names another.
    os.environ["SHOAL_MKL_AVX512"] = "0"
    machine = machines.describe(sys.executable)
    results = {"date": datetime.date.today().isoformat(), "machine": machine}
    measures = {
        "training": lambda: training.measure(tools, machine),
        "real": lambda: real_shape.measure(tools, machine),
        "swarm": lambda: swarm_tables(tools, machine),
        "data": lambda: data_plane.measure(tools),
    }
    for name in [tools.only] if tools.only else TABLES:
        results[name] = measures[name]()
    results["minutes"] = round((time.monotonic() - start) / 60, 1)
    save(results)


def swarm_tables(tools, machine):
    shoal = Shoal(tools.shoal)
    idle = [tools.train_rounds, json.dumps(
        {**dataclasses.asdict(SMALL), "device": "cpu", "threads": 1, "text": tools.text}
    )]
    tables = []
    for dtype in SWARM_DTYPES:
        numbers, best, microbatches = swarm.measure(shoal, tools, dtype, machine)
        numbers["memory"] = memory.measure(
            best, idle, dtype=dtype, stages=swarm.STAGES, microbatches=microbatches, machine=machine
        )
        tables.append(numbers)
    return tables


def save(results):
    path = pathlib.Path(__file__).parent / "results" / size("latest.json", "smoke.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"\n{path.relative_to(pathlib.Path.cwd())}: all numbers, after {results['minutes']} minutes")


if __name__ == "__main__":
    main()
