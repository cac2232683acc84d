"""Trains a checkpoint with virtual workers in PyTorch alone, and prints each outer step's mean loss as JSON, and how
far the weights end from those of another checkpoint.

The one argument is a JSON file: both checkpoints' folders, the outer rate and momentum, AdamW's constants, whether
moments are carried, how many updates a worker makes before it joins the newest meeting, and per outer step each
worker's updates, as steps of `reference.py`. DiLoCo (arXiv 2311.08105), with moments that begin anew at every meeting, or
with the means of all workers' moments and of their roots."""

import copy as copies
import json
import statistics
import sys

import torch

from model import load
from reference import adamw, copy, train


def main():
    with open(sys.argv[1]) as file:
        run = json.load(file)
    torch.set_num_threads(1)
    model = load(run["checkpoint"])
    outer = torch.optim.SGD(model.parameters(), lr=run["rate"], momentum=run["momentum"], nesterov=True)
    start = copy(model)
    losses, carried = [], None
    late = copy(model)
    for workers in run["outer_steps"]:
        newest, of_step, states = copy(model), [], []
        # Workers start from the weights before the last meeting, while its sums travel, and then join it.
        overlap = run["overlap"]
        before = late if overlap else newest
        late = newest
        distances = {name: torch.zeros_like(weight) for name, weight in before.items()}
        for updates in workers:
            model.load_state_dict(before)
            optimizer = adamw(model, run)
            if carried:
                optimizer.load_state_dict(copies.deepcopy(carried))
            origin = before
            if 0 < overlap < len(updates):
                of_step += part(model, run, optimizer, updates[:overlap])
                with torch.no_grad():
                    for name, weight in model.named_parameters():
                        weight += newest[name] - before[name]
                origin, updates = newest, updates[overlap:]
            of_step += part(model, run, optimizer, updates)
            states.append(copies.deepcopy(optimizer.state_dict()))
            for name, weight in model.state_dict().items():
                distances[name] += (origin[name] - weight) / len(workers)
        model.load_state_dict(newest)
        for name, weight in model.named_parameters():
            weight.grad = distances[name]
        outer.step()
        carried = mean(states) if run["carries_moments"] else None
        losses.append(statistics.fmean(of_step))
    theirs, ours = load(run["trained"]).state_dict(), model.state_dict()
    off = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    moved = max((ours[name] - start[name]).abs().max().item() for name in ours)
    print(json.dumps({"losses": losses, "off": off, "moved": moved}))


def part(model, run, optimizer, updates):
    return train(model, {**run, "staleness": 0, "steps": updates}, optimizer)["losses"]


def mean(states):
    """The optimizer's state with the means of first moments, and of the roots of second ones."""
    result = states[0]
    for weight, kept in result["state"].items():
        of_weight = [state["state"][weight] for state in states]
        kept["exp_avg"] = torch.stack([one["exp_avg"] for one in of_weight]).mean(0)
        kept["exp_avg_sq"] = torch.stack([one["exp_avg_sq"].sqrt() for one in of_weight]).mean(0).square()
    return result


if __name__ == "__main__":
    main()
