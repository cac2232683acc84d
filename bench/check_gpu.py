"""Checks on an NVIDIA GPU: a swarm gives the bits of one process. Measures the speed of a larger model in bf16
beside eager PyTorch. scripts/check-gpu.sh builds the programs and calls this script."""

import argparse
import dataclasses
import json
import statistics
import sys
import time

import table
import torch
from model import SMALL, Model
from shoal_run import Shoal
from worker import FOLDER, Worker, closing, ratio, take_turns

DEVICE = "cuda:0"
LARGE = Model(hidden=1024, layers=24, heads=16, intermediate=2816, context=1024, batch=128)
MICROBATCHES = 16
# State of 28 bytes a parameter, the graph of one microbatch, and as much again for PyTorch's side.
LARGE_NEEDS = 40e9
ROUNDS = 5
STAGES_OF_TIERS = 12
# Bytes: weights, moments, accumulator, mean gradient and copy in bf16.
STATE_PER_PARAMETER = 26
LEAST_OF_TIERS = 0.95
VARIANTS = ("plain", "transformers")

# Dense bf16 in TFLOP/s, by data sheet. The first key that the GPU's name contains counts.
DATA_SHEET = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
    "L4": 121,
    "A10G": 70,
    "RTX 3090": 71,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True)
    parser.add_argument("--train-rounds", required=True)
    parser.add_argument("--text", required=True)
    tools = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    same = [check_bits(Shoal(tools.shoal, DEVICE), dtype) for dtype in ("f32", "bf16")]
    same += [check_slices(tools.shoal, dtype) for dtype in ("f32", "bf16")]
    same.append(tiers(Shoal(tools.shoal, DEVICE), LARGE))
    speed(tools)
    if not all(same):
        raise SystemExit("check-gpu: a checkpoint is not that of one process with everything on the GPU")


def check_bits(shoal, dtype):
    """Whether a swarm of two peers on the GPU gives the bits of one process on it."""
    run = {"stages": 2, "dtype": dtype, "microbatches": 8, "steps": 20}
    swarm = shoal.swarm(SMALL, **run).checkpoint_hash
    local = shoal.local(SMALL, 1, **run).checkpoint_hash
    return is_same(f"{dtype}: swarm of two peers {swarm}, one process {local}", swarm, local)


def check_slices(binary, dtype):
    """Whether several GPUs that divide slices give the bits of one; true where there is one."""
    gpus = 4 if torch.cuda.device_count() >= 4 else torch.cuda.device_count() // 2 * 2
    if gpus < 2:
        print(f"{dtype}: slices on several GPUs: skipped: there is one GPU", flush=True)
        return True
    run = {"stages": 1, "dtype": dtype, "microbatches": 8, "steps": 20, "slices": 4}
    several = ",".join(f"cuda:{index}" for index in range(gpus))
    hashes = [Shoal(binary, devices).local(SMALL, 1, **run).checkpoint_hash for devices in (DEVICE, several)]
    return is_same(f"{dtype}: four slices on one GPU {hashes[0]}, on {gpus} {hashes[1]}", *hashes)


def is_same(what, one, other):
    """Whether two checkpoints are the same, also in a line."""
    print(f"{what}: {'equal' if one == other else 'DIFFERENT'}", flush=True)
    return one == other


def tiers(shoal, model):
    """Measures training with a third of the GPU memory that the state takes. Says whether the bits are the same."""
    run = {"stages": STAGES_OF_TIERS, "dtype": "bf16", "microbatches": MICROBATCHES, "steps": 6, "recompute": True}
    limit = STATE_PER_PARAMETER * model.parameters() // 3
    whole = shoal.local(model, 1, **run)
    through = shoal.local(model, 1, flags=["--device-memory", str(limit)], **run)
    moved = through.swapped[0]
    share = through.rate() / whole.rate()
    is_same = through.checkpoint_hash == whole.checkpoint_hash
    tokens = through.tokens_per_step // MICROBATCHES
    print(f"{table.megabytes(limit)} of the GPU's memory, {tokens} tokens a microbatch: {table.rate(through.rate())} tokens/s, "
          f"{table.times(share)} of the speed with everything on the GPU ({table.goal(share, LEAST_OF_TIERS)}); "
          f"{table.megabytes(moved['copied'])} copied, {moved['late'] / max(1, moved['copied']):.0%} not there in time; "
          f"checkpoint {'equal' if is_same else 'DIFFERENT'}", flush=True)
    return is_same


def speed(tools):
    """Prints the table of the larger model."""
    memory = torch.cuda.get_device_properties(0).total_memory
    if memory < LARGE_NEEDS:
        print(f"speed of the larger model: skipped: it needs {LARGE_NEEDS / 1e9:.0f} GB of GPU memory, "
              f"there are {memory / 1e9:.0f}")
        return
    matmul = matmul_rate()
    described = json.dumps(
        {**dataclasses.asdict(LARGE), "device": DEVICE, "threads": 1, "text": tools.text}
    )
    python = [sys.executable, f"{FOLDER}/torch_train.py", described]
    # A process for each, so that none keeps GPU memory of another.
    workers = {
        "Shoal": Worker([tools.train_rounds, described]),
        **{f"PyTorch, {variant}": Worker(python) for variant in VARIANTS},
    }
    with closing(workers.values()):
        contenders = {}
        for name, worker in workers.items():
            order = {"dtype": "bf16", "microbatches": MICROBATCHES}
            if name != "Shoal":
                order["variant"] = name.removeprefix("PyTorch, ")
            worker.ask(**order, steps=2)
            contenders[name] = lambda worker=worker, order=order: rate(worker, order)
        results = take_turns(contenders, ROUNDS)
    report(results, matmul)


def rate(worker, order):
    answer = worker.ask(**order, steps=2)
    return answer["tokens"] / answer["seconds"]


def report(results, matmul):
    name = torch.cuda.get_device_name(0)
    sheet = next((peak for part, peak in DATA_SHEET.items() if part in name), None)
    peak = sheet * 1e12 if sheet else matmul
    source = f"the data sheet's {sheet} TFLOP/s" if sheet else "that"
    rows = []
    for who, rates in results.items():
        middle = statistics.median(rates)
        mfu = middle * flops_per_token(LARGE) / peak
        rows.append([who, table.rate(middle), f"{100 * mfu:.1f}%",
                     table.times(ratio(results["Shoal"], rates))])
    notes = (
        f"{LARGE.describe()}, as {MICROBATCHES} microbatches; bf16. {name}, torch "
        f"{torch.__version__}; a large matrix product reaches {matmul / 1e12:.0f} TFLOP/s, MFU is "
        f"of {source}. Median of {ROUNDS} alternated rounds. PyTorch keeps weights and moments in "
        "bf16, Shoal in f32, and Shoal's algorithms are the deterministic ones."
    )
    table.show("Training a larger model on a GPU", notes,
               ["contender", "tokens/s", "MFU", "Shoal to it"], rows)


def flops_per_token(model):
    """FLOPs of forward and backward: 6 for each multiplied weight, and causal attention."""
    multiplied = model.parameters() - model.vocabulary * model.hidden
    return 6 * multiplied + 6 * model.layers * model.hidden * model.context


def matmul_rate():
    """Speed of a large product of bf16 matrices, in FLOP/s."""
    size, times = 8192, 20
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        a @ b
    torch.cuda.synchronize()
    reached = times * 2 * size**3 / (time.perf_counter() - start)
    del a, b
    torch.cuda.empty_cache()
    return reached


if __name__ == "__main__":
    main()
