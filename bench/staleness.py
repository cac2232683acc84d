"""Measures what delayed updates do to the loss under AdamW and under Muon.

    make bench-staleness DATA=tinyshakespeare.txt
    .venv/bin/python bench/staleness.py --shoal target/release/shoal --data TEXT --data OTHER --plot FOLDER

With `staleness = n` a step reads weights that lack the newest n updates. The default model (hidden 128) trains for 500
steps, or `--steps`, with each optimizer, text and seed. A loss is the mean of the last 100 steps. A difference is
to the run without delay of the same optimizer, text and seed, with the same samples and initial weights. AdamW trains
at its default rate and at a third of it, since delays suit lower rates.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys

import losses
import machine as machines
import model as models
import table
from losses import LAST, STEPS, final, held_out
from shoal_run import Shoal
from sizes import size

GOAL = 0.01
SEEDS = size((1, 2, 3), (1,))
DELAYS = size((0, 1), (0, 1))
COMMON = (f"warmup_steps = {losses.WARMUP_STEPS}", "weight_decay = 0.1", "gradient_clip = 1.0")
ADAM = ("beta1 = 0.9", "beta2 = 0.95", "epsilon = 1e-8")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer by its name in the table, and its keys. The rate falls to a tenth as a cosine."""

    name: str
    keys: tuple
    # Whether it is to be within the goal.
    has_goal: bool = False


OPTIMIZERS = [
    Optimizer("AdamW, rate 0.0015", (
        'kind = "adamw"', "learning_rate = 0.0015", "final_learning_rate = 0.00015", *ADAM)),
    Optimizer("AdamW, rate 0.0005", (
        'kind = "adamw"', "learning_rate = 0.0005", "final_learning_rate = 0.00005", *ADAM)),
    Optimizer("Muon, rate 0.01", (
        'kind = "muon"', "learning_rate = 0.01", "final_learning_rate = 0.001", "rest_learning_rate = 0.0015", *ADAM),
        has_goal=True),
][::size(1, 2)]


@dataclasses.dataclass(frozen=True)
class Run:
    optimizer: Optimizer
    text: str
    seed: int
    delay: int

    def without_delay(self):
        return dataclasses.replace(self, delay=0)


def train(shoal, run, steps):
    values = {"training": {"steps": steps, "stages": 1, "seed": run.seed, "staleness": run.delay}}
    keys = (*run.optimizer.keys, *COMMON)
    return losses.train(shoal, run.text, values, lambda text: models.replace_section(text, "optimizer", keys))


def rows_of(text, every_seed, runs):
    """A row for each optimizer and delay."""
    rows = []
    for optimizer in OPTIMIZERS:
        for delay in DELAYS:
            seeds = [Run(optimizer, text, seed, delay) for seed in every_seed]
            gaps = [final(runs[run]) - final(runs[run.without_delay()]) for run in seeds]
            mean = statistics.fmean(gaps)
            judged = delay and optimizer.has_goal
            rows.append([
                os.path.basename(text), optimizer.name, delay,
                f"{statistics.fmean(final(runs[run]) for run in seeds):.4f}",
                f"{statistics.fmean(held_out(runs[run]) for run in seeds):.4f}",
                f"{mean:+.4f}" if delay else "",
                f"{min(gaps):+.4f} to {max(gaps):+.4f}" if delay and len(gaps) > 1 else "",
                ("met" if mean <= GOAL else "NOT met") if judged else "",
            ])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--data", required=True, action="append", help="a text to train on; repeatable")
    parser.add_argument("--steps", type=int, default=STEPS, help="the steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--plot", type=pathlib.Path, help="the path of the plot of the first text, as SVG")
    options = parser.parse_args()
    shoal, texts = Shoal(options.shoal), [os.path.abspath(text) for text in options.data]
    job = lambda run: lambda: train(shoal, run, options.steps)
    every = [Run(optimizer, text, seed, delay)
             for text in texts for optimizer in OPTIMIZERS for seed in options.seeds for delay in DELAYS]
    runs = losses.train_all({run: job(run) for run in every})
    table.show(
        "Delayed updates",
        f"hidden 128, 4 layers, {options.steps} steps of 2048 tokens, f32, seeds {', '.join(map(str, options.seeds))}; "
        f"{machines.line(machines.describe(sys.executable))}. Loss: mean of the last {LAST} steps, nats per token; held "
        f"out: the last evaluation. Goal: at most {GOAL} above the run without delay.",
        ["text", "optimizer", "staleness", "loss", "held out", "above 0", "over seeds", "goal"],
        [row for text in texts for row in rows_of(text, options.seeds, runs)],
    )
    if options.plot:
        delayed = [Run(optimizer, texts[0], options.seeds[0], delay)
                   for optimizer in OPTIMIZERS for delay in DELAYS if delay]
        curves = [(f"{run.optimizer.name}, staleness {run.delay}", runs[run], runs[run.without_delay()])
                  for run in delayed]
        losses.plot(curves, options.plot, "loss above that without delay")


if __name__ == "__main__":
    main()
