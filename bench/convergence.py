"""What rounding between stages does to training: the same small run with each codec.

    make bench-convergence DATA=tinyshakespeare.txt

The default model (hidden 128) in four stages, so that three boundaries are rounded both ways, 500
steps. A loss is the mean of the last 100 steps; a difference is to f32's with the same seed, which
sees the same samples from the same weights.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import machine as machines
import model as models
import table
from shoal_run import Shoal

STEPS, LAST = 500, 100
GOAL = 0.01
SEEDS = (1, 2, 3)
# Activations, gradients, rounding of gradients, seeds.
RUNS = [
    ("f32", "f32", "nearest", SEEDS),
    ("bf16", "bf16", "nearest", SEEDS[:1]),
    ("f16", "f16", "nearest", SEEDS[:1]),
    ("int8", "int8", "nearest", SEEDS),
    ("int8", "int8", "stochastic", SEEDS[:1]),
    ("int8:1024", "int8:1024", "nearest", SEEDS[:1]),
    ("fp8", "fp8", "nearest", SEEDS[:1]),
    ("int4", "int8", "nearest", SEEDS[:1]),
    ("int4", "int4", "nearest", SEEDS[:1]),
    ("int4", "int4", "stochastic", SEEDS[:1]),
]
COLOURS = ("#444444", "#4477aa", "#66ccee", "#228833", "#99bb33", "#117755", "#aa3377", "#ccbb44",
           "#ee6677", "#ee8866")


def name(run):
    activations, gradients, rounding, _ = run
    both = activations if activations == gradients else f"{activations}, gradients {gradients}"
    return both if rounding == "nearest" else f"{both}, stochastic"


def train(shoal, data, run, seed):
    """The report of one run."""
    activations, gradients, rounding, _ = run
    values = {
        "training": {"steps": STEPS, "stages": 4, "seed": seed},
        "codec": {
            "activations": f'"{activations}"',
            "activation_gradients": f'"{gradients}"',
            "gradient_rounding": f'"{rounding}"',
        },
    }
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        text = models.edit_toml(shoal.default, values)
        text = text.replace('# path = "text.txt"', f"path = {json.dumps(data)}")
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
    """How much higher each loss is than f32's, in means of 20 steps, as SVG."""
    width, height, left, top, span = 720, 360, 60, 20, 20
    reference = curves[0][1]
    lines = []
    for label, steps in curves:
        gaps = [steps[i]["loss"] - reference[i]["loss"] for i in range(STEPS)]
        lines.append((label, [statistics.fmean(gaps[i:i + span]) for i in range(0, STEPS, span)]))
    high = max(max(line) for _, line in lines) * 1.05
    low = min(min(line) for _, line in lines) * 1.05
    x = lambda index: left + index / (STEPS / span - 1) * (width - left - 200)
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
    for step in range(0, STEPS + 1, 100):
        at = left + step / STEPS * (width - left - 200)
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
    parser.add_argument("--plot", type=pathlib.Path, help="where the plot goes, as SVG")
    options = parser.parse_args()
    shoal, data = Shoal(options.shoal), os.path.abspath(options.data)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = {(name(run), seed): pool.submit(train, shoal, data, run, seed)
                   for run in RUNS for seed in run[3]}
        runs = {key: future.result() for key, future in started.items()}
    rows = []
    for run in RUNS:
        label, seeds = name(run), run[3]
        gaps = [final(runs[label, seed]) - final(runs["f32", seed]) for seed in seeds]
        mean = statistics.fmean(gaps)
        rows.append([
            label, len(seeds),
            f"{statistics.fmean(final(runs[label, seed]) for seed in seeds):.4f}",
            f"{statistics.fmean(held_out(runs[label, seed]) for seed in seeds):.4f}",
            f"{mean:+.4f}" if label != "f32" else "",
            f"{min(gaps):+.4f} to {max(gaps):+.4f}" if len(seeds) > 1 and label != "f32" else "",
            "" if len(seeds) == 1 or label == "f32" else "met" if abs(mean) <= GOAL else "NOT met",
        ])
    table.show(
        "What rounding between stages does to training",
        f"hidden 128, 4 layers in 4 stages, {STEPS} steps of 2048 tokens of "
        f"{os.path.basename(data)}; {machines.line(machines.describe(sys.executable))}. Loss: mean "
        f"of the last {LAST} steps, nats per token; held out: the last look. Goal, where there are "
        f"several seeds: within {GOAL}.",
        ["codec", "seeds", "loss", "held out", "above f32", "over seeds", "goal"],
        rows,
    )
    if options.plot:
        plot([(name(run), runs[name(run), 1]) for run in RUNS], options.plot)


if __name__ == "__main__":
    main()
