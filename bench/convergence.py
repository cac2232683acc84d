"""Measures the effect of codecs and trained compression between stages on the loss of a small run.

    make bench-convergence DATA=tinyshakespeare.txt

The default model (hidden 128) in four stages has three boundaries, which a codec rounds in both directions or
trained layers compress; another run has delayed updates. Each run has 500 steps, or `--steps`. A loss is the mean
of the last 100 steps. A difference is to the f32 run of the same seed, with the same samples and initial weights.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import statistics
import sys

import losses
import machine as machines
import table
from losses import LAST, STEPS, final, held_out
from shoal_run import Shoal
from sizes import size

GOAL = 0.01
SEEDS = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration of the boundaries: codecs, trained layers and staleness."""

    activations: str = "f32"
    gradients: str = "f32"
    rounding: str = "nearest"
    boundary: str = ""
    staleness: int = 0
    seeds: tuple = SEEDS[:1]

    def name(self):
        both = self.activations
        if self.gradients != both:
            both += f", gradients {self.gradients}"
        if self.rounding != "nearest":
            both += ", stochastic"
        if self.staleness:
            both += f", staleness {self.staleness}"
        return f"{self.boundary} {WIDTH}, {both}" if self.boundary else both


# The width of a trained boundary, of 128 numbers.
WIDTH = 32
REFERENCE = Run(seeds=SEEDS)
RUNS = [
    REFERENCE,
    Run("bf16", "bf16"),
    Run("f16", "f16"),
    Run("int8", "int8", seeds=SEEDS),
    Run("int8", "int8", "stochastic"),
    Run("int8:1024", "int8:1024"),
    Run("fp8", "fp8"),
    Run("int4", "int8"),
    Run("int4", "int4"),
    Run("int4", "int4", "stochastic"),
    Run(boundary="bottleneck"),
    Run(boundary="maxout"),
    Run("int8", "int8", boundary="bottleneck"),
    Run(staleness=1),
][::size(1, 3)]


def train(shoal, data, run, seed, steps):
    """The steps of one run."""
    values = {
        "training": {
            "steps": steps, "stages": 4, "seed": seed, "staleness": run.staleness,
        },
        "codec": {
            "activations": f'"{run.activations}"',
            "activation_gradients": f'"{run.gradients}"',
            "gradient_rounding": f'"{run.rounding}"',
        },
    }
    boundary = f'boundary = {{ kind = "{run.boundary}", width = {WIDTH} }}'
    edit = lambda text: re.sub("^# boundary = .*", boundary, text, flags=re.MULTILINE) if run.boundary else text
    return losses.train(shoal, data, values, edit)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--data", required=True, help="the text to train on")
    parser.add_argument("--steps", type=int, default=STEPS, help="the steps of each run")
    parser.add_argument("--plot", type=pathlib.Path, help="the path of the plot, as SVG")
    options = parser.parse_args()
    shoal, data = Shoal(options.shoal), os.path.abspath(options.data)
    job = lambda run, seed: lambda: train(shoal, data, run, seed, options.steps)
    runs = losses.train_all({(run, seed): job(run, seed) for run in RUNS for seed in run.seeds})
    rows = []
    for run in RUNS:
        seeds = run.seeds
        gaps = [final(runs[run, seed]) - final(runs[REFERENCE, seed]) for seed in seeds]
        mean, several = statistics.fmean(gaps), len(seeds) > 1 and run != REFERENCE
        rows.append([
            run.name(), len(seeds),
            f"{statistics.fmean(final(runs[run, seed]) for seed in seeds):.4f}",
            f"{statistics.fmean(held_out(runs[run, seed]) for seed in seeds):.4f}",
            f"{mean:+.4f}" if run != REFERENCE else "",
            f"{min(gaps):+.4f} to {max(gaps):+.4f}" if several else "",
            "" if not several else "met" if abs(mean) <= GOAL else "NOT met",
        ])
    table.show(
        "Codecs and trained compression between stages",
        f"hidden 128, 4 layers in 4 stages, {options.steps} steps of 2048 tokens of "
        f"{os.path.basename(data)}; {machines.line(machines.describe(sys.executable))}. Loss: mean "
        f"of the last {LAST} steps, nats per token; held out: the last evaluation. Goal, with "
        f"several seeds: within {GOAL}.",
        ["boundary", "seeds", "loss", "held out", "above f32", "over seeds", "goal"],
        rows,
    )
    if options.plot:
        curves = [(run.name(), runs[run, 1], runs[REFERENCE, 1]) for run in RUNS]
        losses.plot(curves, options.plot, "loss above that of f32")


if __name__ == "__main__":
    main()
