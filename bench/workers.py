"""Measures what virtual workers that sync now and then do to the loss, at the same tokens.

    make bench-workers DATA=tinyshakespeare.txt
    .venv/bin/python bench/workers.py --shoal target/release/shoal --data FILE --warm 900 --steps 300

With `--warm` all runs begin with the weights of one that trained for so many steps, as Douillard et al. (arXiv 2311.08105)
begin with a trained model. The default model (hidden 128) trains for 600 steps of 8 microbatches: all peers together in every step, or four workers
with a share of two microbatches each, which sync after every 10, 30 or 100 steps. Initial weights and the number of
tokens are the same. A loss is that of the last evaluation on held-out text, which a run makes before every step that
follows a sync; it is compared with that of the run without workers at the same step.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import losses
import machine as machines
import table
from shoal_run import Shoal
from sizes import size

STEPS = size(600, 4)
WORKERS = size(4, 2)
MICROBATCHES = 8
# Steps between two syncs, the precision of a worker's delta, what a worker's moments begin with, and how many of the
# next steps overlap with a sync.
RUNS = size([
    (10, "f32", "zero", 0), (30, "f32", "zero", 0), (100, "f32", "zero", 0),
    (10, "f32", "mean", 0), (30, "f32", "mean", 0), (100, "f32", "mean", 0),
    (30, "int8", "mean", 0), (30, "int4", "mean", 0), (30, "int2", "mean", 0), (30, "int2", "zero", 0),
    (10, "f32", "zero", 2), (10, "f32", "zero", 10),
    (30, "f32", "zero", 3), (30, "f32", "zero", 10), (30, "f32", "zero", 30),
], [(2, "f32", "zero", 1), (2, "f32", "zero", 2), (2, "int2", "mean", 0)])
GOAL = (30, 0.02)


def train(shoal, data, steps, run, base=None):
    """The steps of the report of one run, from a base if there is one."""
    microbatches = MICROBATCHES if run is None else MICROBATCHES // WORKERS
    values = {
        "training": {"steps": steps, "stages": 1, "microbatches": microbatches},
        "evaluation": {"every": run[0] if run else size(10, 2), "microbatches": size(64, 2)},
    }
    section = ""
    if run:
        every, codec, moments, overlap = run
        section = (f'\n[outer]\nworkers = {WORKERS}\nevery = {every}\ncodec = "{codec}"\nmoments = "{moments}"\n'
                   f"overlap = {overlap}\n")
    model = f'[model]\nfrom = "{base}"\ncontext = 128\n' if base else None
    edit = lambda text: (re.sub(r"\[model\]\n.*?\n\n", model + "\n", text, flags=re.DOTALL) if model else text) + section
    return losses.train(shoal, data, values, edit)


def base_of(shoal, data, steps, folder):
    """A model that all peers trained together."""
    values = {"training": {"steps": steps, "stages": 1, "microbatches": MICROBATCHES}}
    losses.train(shoal, data, values, keep=folder)
    command = [shoal.binary, "import", "out/checkpoint", "--out", "base"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return os.path.join(folder, "base")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--data", required=True, help="the text to train on")
    parser.add_argument("--steps", type=int, default=STEPS, help="the steps of a worker")
    parser.add_argument("--warm", type=int, default=0, help="the steps that made the model to begin with")
    parser.add_argument("--plot", type=pathlib.Path, help="the path of the plot, as SVG")
    options = parser.parse_args()
    shoal, data = Shoal(options.shoal), os.path.abspath(options.data)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        base = base_of(shoal, data, options.warm, folder) if options.warm else None
        job = lambda run: lambda: train(shoal, data, options.steps, run, base)
        runs = losses.train_all({run: job(run) for run in [None, *RUNS]})
    evaluated = {run: evaluations(steps, run) for run, steps in runs.items()}
    table.show(
        "Virtual workers",
        f"hidden 128, 4 layers, {WORKERS} workers, {options.steps} steps of 2048 tokens, from a model of {options.warm} steps, f32; "
        f"{machines.line(machines.describe(sys.executable))}. Loss: the last evaluation with held-out text, nats per "
        f"token; above: relative to all peers together at the same step. Goal: at most {GOAL[1]:.0%} at {GOAL[0]} steps.",
        ["steps between syncs", "a worker's delta", "moments", "overlap", "step", "loss", "all together", "above", "goal"],
        [row(run, evaluated) for run in RUNS],
    )
    if options.plot:
        curves = [(name(run), [(step, loss - evaluated[None][step]) for step, loss in evaluated[run].items()])
                  for run in RUNS]
        losses.draw(curves, options.steps, options.plot, "held-out loss above all together, nats per token")


def name(run):
    every, codec, moments, overlap = run
    return f"every {every}, {codec}, {moments}" + (f", overlap {overlap}" if overlap else "")


def evaluations(steps, run):
    """The held-out loss after so many steps of a worker."""
    every = run[0] if run else 1
    return {index * every: step["held_out_loss"]
            for index, step in enumerate(steps) if step.get("held_out_loss") is not None}


def row(run, evaluated):
    every, codec, moments, overlap = run
    step, loss = list(evaluated[run].items())[-1]
    together = evaluated[None][step]
    above = loss / together - 1
    judged = ("met" if above <= GOAL[1] else "NOT met") if every == GOAL[0] else ""
    return [every, codec, moments, overlap, step, f"{loss:.4f}", f"{together:.4f}", f"{above:+.2%}", judged]


if __name__ == "__main__":
    main()
