"""Measures the bytes that two replicas send for the all-reduce of a step: a mixture of experts beside a dense model.

    make bench-mixture-round
    .venv/bin/python bench/mixture_round.py --shoal target/debug/shoal

All models have the same size. Each replica does half of a step's tokens; an expert that got none of a step's tokens has a
gradient of zero. The all-reduce is exact, and the link is loopback, where nothing but sums and zeros is packed.
"""

import argparse
import dataclasses
import pathlib

import table
from model import Model
from shoal_run import Shoal
from sizes import size
from worker import FOLDER

ROOT = pathlib.Path(FOLDER).parent
EXPERTS = size(32, 8)
INSIDE = size(256, 96)
DENSE = Model(
    hidden=size(256, 64), layers=1, heads=4, intermediate=EXPERTS * INSIDE, context=8, batch=2
)
MIXTURE = dataclasses.replace(DENSE, intermediate=INSIDE, experts=EXPERTS, experts_per_token=1)
MICROBATCHES = 2
STEPS = 3
# Samples of a step.
FEW, MANY = 2, size(64, 16)


def experts_of(model):
    """The section of run.toml."""
    return (
        f"\n[model.experts]\ncount = {model.experts}\nper_token = {model.experts_per_token}\n"
        f"intermediate = {model.intermediate}\n"
    )


def measure(shoal, model):
    """Bytes of tensors that both peers sent in a step."""
    more = experts_of(model) if model.experts else ""
    run = {"dtype": "f32", "stages": 1, "microbatches": MICROBATCHES, "steps": STEPS, "more": more}
    outcome = shoal.swarm(model, replicas=2, **run)
    return sum(sent["tensor"] for sent in outcome.sent) / STEPS


def row(shoal, name, model):
    sent = measure(shoal, model)
    tokens = model.tokens_per_step() * max(model.experts_per_token, 1)
    each = f"{tokens / model.experts:.1f}" if model.experts else ""
    return [
        name, model.tokens_per_step(), each, f"{model.parameters() / 1e6:.2f}M", table.megabytes(sent),
        f"{sent / model.parameters():.2f}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shoal", default=str(ROOT / "target" / "release" / "shoal"))
    shoal = Shoal(parser.parse_args().shoal)
    rows = [
        row(shoal, name, dataclasses.replace(model, batch=batch))
        for name, model in {"dense": DENSE, f"{EXPERTS} experts": MIXTURE}.items()
        for batch in (MANY, FEW)
    ]
    table.show(
        "Bytes of a round",
        f"Two replicas of one stage, exact sums, loopback; width {DENSE.hidden}, one layer, one expert a token; "
        f"mean of {STEPS} steps, both replicas together.",
        ["model", "tokens a step", "of an expert", "parameters", "bytes a step", "bytes a parameter"],
        rows,
    )


if __name__ == "__main__":
    main()
