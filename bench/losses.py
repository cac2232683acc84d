"""The losses of small runs in one process, for benchmarks that compare them."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

import model as models
from sizes import size

STEPS, LAST = size((500, 100), (2, 1))
# That of the default configuration.
WARMUP_STEPS = 20
# A point of a plot is the mean of so many steps.
SPAN = size(20, 1)
COLOURS = ("#444444", "#4477aa", "#66ccee", "#228833", "#99bb33", "#117755", "#aa3377", "#ccbb44",
           "#ee6677", "#ee8866", "#332288", "#88ccee", "#882255", "#999933", "#cc6677")


def train(shoal, data, values, edit=lambda text: text, keep=None):
    """The steps of the report of one run: the default one with other values, and what `edit` changes in its TOML. `keep`
    is a folder for its files, so that they stay."""
    with contextlib.nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        text = models.edit_toml(shoal.default, values)
        text = text.replace('# path = "text.txt"', f"path = {json.dumps(data)}")
        # A warm-up is no longer than a run.
        text = models.edit_toml(edit(text), {"optimizer": {"warmup_steps": size(WARMUP_STEPS, 1)}})
        pathlib.Path(folder, "run.toml").write_text(text, encoding="utf-8")
        command = [shoal.binary, "local", "run.toml", "--out", "out", "--threads", "1", "--device", "cpu"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        report = json.loads(pathlib.Path(folder, "out/report.json").read_text(encoding="utf-8"))
    return report["steps"]


def train_all(runs):
    """The steps of all runs, by key: each is a function without arguments. As many at a time as there are processors."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = {key: pool.submit(run) for key, run in runs.items()}
        return {key: future.result() for key, future in started.items()}


def final(steps):
    """The mean loss of the last steps."""
    return statistics.fmean(step["loss"] for step in steps[-LAST:])


def held_out(steps):
    """The loss of the last evaluation."""
    return [step["held_out_loss"] for step in steps if step.get("held_out_loss") is not None][-1]


def plot(curves, path, label):
    """Plots how far each run's loss lies above that of its reference as SVG, in means of `SPAN` steps. `curves` are
    names, steps and the reference's steps."""
    lines = []
    for name, steps, reference in curves:
        gaps = [step["loss"] - same["loss"] for step, same in zip(steps, reference, strict=True)]
        lines.append((name, [(start, statistics.fmean(gaps[start:start + SPAN]))
                             for start in range(0, len(gaps), SPAN)]))
    draw(lines, len(curves[0][1]), path, f"{label}, nats per token, means of 20 steps")


def draw(lines, total, path, label):
    """Draws lines over `total` steps as SVG: names with points of step and value."""
    width, height, left, top = 720, 360, 60, 20
    values = [value for _, points in lines for _, value in points]
    high, low = max(values) * 1.05, min(values) * 1.05
    last = max(step for _, points in lines for step, _ in points)
    x = lambda step: left + step / (last or 1) * (width - left - 200)
    y = lambda value: top + (high - value) / (high - low or 1.0) * (height - top - 50)
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
        at = x(min(step, last))
        parts.append(f'<text x="{at:.1f}" y="{height - 30}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(left + width - 200) / 2}" y="{height - 10}" text-anchor="middle">'
                 f'step; {label}</text>')
    for (_, line), colour in zip(lines, COLOURS):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for row, ((name, _), colour) in enumerate(zip(lines, COLOURS)):
        at = top + 18 * row + 6
        parts.append(f'<line x1="{width - 190}" x2="{width - 170}" y1="{at}" y2="{at}" '
                     f'stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{width - 164}" y="{at + 4}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
