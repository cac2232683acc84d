"""Trains a checkpoint on given batches with PyTorch alone and prints the losses as JSON, and how far
its weights end from those of another checkpoint.

The one argument is a JSON file: both checkpoints' folders, per step the microbatches' inputs and labels and
the learning rate, how many versions old the weights are that a step reads, and AdamW's constants."""

import json
import sys

import torch

from model import load


def main():
    with open(sys.argv[1]) as file:
        run = json.load(file)
    torch.set_num_threads(1)
    model = load(run["checkpoint"])
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": run["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(run["beta1"], run["beta2"]),
        eps=run["epsilon"],
    )
    losses, norms = [], []
    versions = [copy(model)]
    for number, step in enumerate(run["steps"]):
        optimizer.zero_grad()
        model.load_state_dict(versions[max(0, number - run["staleness"])])
        mean = 0.0
        for batch in step["microbatches"]:
            logits = model(torch.tensor(batch["inputs"])).logits
            labels = torch.tensor(batch["labels"]).flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
            (loss / len(step["microbatches"])).backward()
            mean += loss.item() / len(step["microbatches"])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run["gradient_clip"])
        for group in optimizer.param_groups:
            group["lr"] = step["learning_rate"]
        model.load_state_dict(versions[number])
        optimizer.step()
        versions.append(copy(model))
        losses.append(mean)
        norms.append(norm.item())
    theirs = load(run["trained"]).state_dict()
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    off = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    moved = max((ours[name] - versions[0][name]).abs().max().item() for name in ours)
    print(json.dumps({"losses": losses, "norms": norms, "off": off, "moved": moved}))


def copy(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


main()
