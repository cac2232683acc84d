"""Measures what a subspace at stage boundaries does to the loss and the bytes of a small run.

    make bench-subspace DATA=tinyshakespeare.txt

A model of hidden 256 and four layers trains for 500 steps, or `--steps`: without a boundary, and with the
residual stream in a subspace of `--widths` dimensions, in each of `--stages` stages. All runs have the same
samples and the same initial embedding. A loss is the mean of the last 100 steps.
"""

import argparse
import os
import re
import sys

import losses
import machine as machines
import table
from losses import LAST, STEPS
from shoal_run import Shoal
from sizes import size

HIDDEN, INTERMEDIATE, HEADS = size((256, 688, 4), (64, 128, 2))
GOAL = 0.01
# Of a label, and of a token id in a run with a subspace.
WORD = 4


def train(shoal, data, steps, stages, width):
    """The steps of one run."""
    values = {
        "model": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "heads": HEADS},
        "training": {"steps": steps, "stages": stages},
    }
    boundary = f'boundary = {{ kind = "subspace", width = {width} }}'
    edit = lambda text: re.sub("^# boundary = .*", boundary, text, flags=re.MULTILINE) if width else text
    return losses.train(shoal, data, values, edit)


def bytes_of_token(width):
    """Bytes of a token at one boundary, forward with its label and id, and backward."""
    words = 2 if width else 1
    numbers = 4 * (width or HIDDEN)
    return numbers + words * WORD, numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", required=True, help="the node's release binary")
    parser.add_argument("--data", required=True, help="the text to train on")
    parser.add_argument("--steps", type=int, default=STEPS, help="the steps of each run")
    parser.add_argument("--widths", type=int, nargs="+", default=size([64, 16, 8], [8]))
    parser.add_argument("--stages", type=int, nargs="+", default=size([4, 2], [2]))
    options = parser.parse_args()
    shoal, data = Shoal(options.shoal), os.path.abspath(options.data)
    # Without a boundary the cut into stages changes no loss.
    cases = [(max(options.stages), None)]
    cases += [(stages, width) for stages in options.stages for width in options.widths]
    job = lambda case: lambda: train(shoal, data, options.steps, *case)
    runs = losses.train_all({case: job(case) for case in cases})
    final = lambda case: losses.final(runs[case])
    held_out = lambda case: losses.held_out(runs[case])
    plain = final(cases[0])
    rows = []
    for case in cases:
        stages, width = case
        forward, backward = bytes_of_token(width)
        above = final(case) / plain - 1
        fewer = sum(bytes_of_token(None)) / (forward + backward)
        rows.append([
            f"subspace {width}" if width else "none", stages if width else "any",
            forward, backward, f"{fewer:.1f}x" if width else "",
            f"{final(case):.4f}", f"{held_out(case):.4f}",
            f"{100 * above:+.2f}%" if width else "",
            ("met" if above <= GOAL else "NOT met") if width else "",
        ])
    table.show(
        "Boundaries in a subspace",
        f"hidden {HIDDEN}, 4 layers, {options.steps} steps of 2048 tokens of "
        f"{os.path.basename(data)}, f32; {machines.line(machines.describe(sys.executable))}. Loss: mean of the "
        f"last {LAST} steps, nats per token; held out: the last evaluation. Goal: at most "
        f"{100 * GOAL:.0f}% above the run without a boundary.",
        ["boundary", "stages", "bytes forward", "backward", "fewer", "loss", "held out", "above none", "goal"],
        rows,
    )


if __name__ == "__main__":
    main()
