"""Measures the effect of codecs and trained compression between stages on the loss of a small run.

    make bench-convergence DATA=tinyshakespeare.txt

The default model (hidden 128) in four stages has three boundaries, which a codec rounds in both directions or
trained layers compress; another run has delayed updates. Each run has 500 steps, or `--steps`. A loss is the mean
of the last 100 steps. A difference is to the f32 run of the same seed, with the same samples and initial weights.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import machine as machines
import model as models
import table
from shoal_run import Shoal
from sizes import size

STEPS, LAST = size((500, 100), (2, 1))
# A point of the plot is the mean of so many steps.
SPAN = size(20, 1)
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
COLOURS = ("#444444", "#4477aa", "#66ccee", "#228833", "#99bb33", "#117755", "#aa3377", "#ccbb44",
           "#ee6677", "#ee8866", "#332288", "#88ccee", "#882255", "#999933")


def train(shoal, data, run, seed, steps):
    """The report of one run."""
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
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        text = models.edit_toml(shoal.default, values)
        text = text.replace('# path = "text.txt"', f"path = {json.dumps(data)}")
        if run.boundary:
            boundary = f'boundary = {{ kind = "{run.boundary}", width = {WIDTH} }}'
            text = re.sub("^# boundary = .*", boundary, text, flags=re.MULTILINE)
        pathlib.Path(folder, "run.toml").write_text(text, encoding="utf-8")
        command = [shoal.binary, "local", "run.toml", "--out", "out", "--threads", "1",
                   "--device", "cpu"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        report = json.loads(pathlib.Path(folder, "out/report.json").read_text(encoding="utf-8"))
    return report["steps"]


def final(steps):
    return statistics.fmean(step["loss"] for step in steps[-LAST:])


def held_out(steps):
    return [step["held_out_loss"] for step in steps if step.get("held_out_loss") is not None][-1]


def plot(curves, path):
    """Plots the difference of each loss to that of f32 as SVG, in means of `SPAN` steps."""
    width, height, left, top, span = 720, 360, 60, 20, SPAN
    reference = curves[0][1]
    total = len(reference)
    lines = []
    for label, steps in curves:
        gaps = [steps[i]["loss"] - reference[i]["loss"] for i in range(total)]
        lines.append((label, [statistics.fmean(gaps[i:i + span]) for i in range(0, total, span)]))
    high = max(max(line) for _, line in lines) * 1.05
    low = min(min(line) for _, line in lines) * 1.05
    x = lambda index: left + index / (math.ceil(total / span) - 1) * (width - left - 200)
    y = lambda value: top + (high - value) / (high - low) * (height - top - 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(6):
        value = low + (high - low) * tick / 5
        parts.append(f'<line x1="{left}" x2="{width - 200}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                     'stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    for step in range(0, total + 1, 100):
        at = left + step / total * (width - left - 200)
        parts.append(f'<text x="{at:.1f}" y="{height - 30}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(left + width - 200) / 2}" y="{height - 10}" text-anchor="middle">'
                 'step; loss above that of f32, nats per token, means of 20 steps</text>')
    for (label, line), colour in zip(lines, COLOURS):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for row, ((label, _), colour) in enumerate(zip(lines, COLOURS)):
        at = top + 18 * row + 6
        parts.append(f'<line x1="{width - 190}" x2="{width - 170}" y1="{at}" y2="{at}" '
                     f'stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{width - 164}" y="{at + 4}">{label}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--data", required=True, help="the text to train on")
    parser.add_argument("--steps", type=int, default=STEPS, help="the steps of each run")
    parser.add_argument("--plot", type=pathlib.Path, help="the path of the plot, as SVG")
    options = parser.parse_args()
    shoal, data = Shoal(options.shoal), os.path.abspath(options.data)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = {(run, seed): pool.submit(train, shoal, data, run, seed, options.steps)
                   for run in RUNS for seed in run.seeds}
        runs = {key: future.result() for key, future in started.items()}
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
        plot([(run.name(), runs[run, 1]) for run in RUNS], options.plot)


if __name__ == "__main__":
    main()
