"""Trains a model on given pairs with the losses of preferences, and compares with a trained export.

The argument is a JSON file: by name the folders of the model and of the trained one, the loss and its factors, and per step
the learning rate and the pairs of each microbatch: prompt, chosen and rejected, in tokens. Each sequence is a pass of its
own. The losses are those of the papers, with the normalisation that TRL has:

- dpo: Rafailov et al., arXiv 2305.18290, equation 7;
- ipo: Azar et al., arXiv 2310.12036, equation 17, of means over tokens;
- simpo: Meng et al., arXiv 2405.14734, equation 6;
- orpo: Hong et al., arXiv 2403.07691, equations 3 to 7.

A step is the mean over its pairs."""

import json
import pathlib
import sys

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from reference import adamw, copy


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def log_probability(model, prompt, completion):
    """The sum over the completion's tokens."""
    tokens = torch.tensor([prompt + completion])
    logits = model(tokens[:, :-1]).logits.log_softmax(-1)
    each = logits.gather(-1, tokens[:, 1:, None]).flatten()
    return each[len(prompt) - 1 :].sum()


def both(model, pair):
    return [log_probability(model, pair["prompt"], pair[which]) for which in ("chosen", "rejected")]


def loss_of(run, pair, sums, references):
    """The loss of a pair, and the difference of its rewards."""
    beta, gamma = run["beta"], run["gamma"]
    means = [one / len(pair[which]) for one, which in zip(sums, ("chosen", "rejected"))]
    if run["loss"] == "dpo":
        margin = beta * ((sums[0] - references[0]) - (sums[1] - references[1]))
        return -logsigmoid(margin), margin
    if run["loss"] == "ipo":
        references = [one / len(pair[which]) for one, which in zip(references, ("chosen", "rejected"))]
        difference = (means[0] - references[0]) - (means[1] - references[1])
        return (difference - 1 / (2 * beta)) ** 2, beta * difference
    margin = beta * (means[0] - means[1])
    if run["loss"] == "simpo":
        return -logsigmoid(margin - gamma), margin
    odds = [mean - torch.log1p(-mean.exp()) for mean in means]
    return -means[0] - beta * logsigmoid(odds[0] - odds[1]), margin


def train(run):
    model, reference = load(run["source"]), load(run["source"])
    optimizer = adamw(model, run)
    result = {"losses": [], "norms": [], "margins": [], "accuracies": [], "references": []}
    for step in run["steps"]:
        optimizer.zero_grad()
        pairs = [pair for microbatch in step["microbatches"] for pair in microbatch]
        total, margins = 0.0, []
        for pair in pairs:
            with torch.no_grad():
                references = both(reference, pair)
            loss, margin = loss_of(run, pair, both(model, pair), references)
            (loss / len(pairs)).backward()
            total += loss.item() / len(pairs)
            margins.append(margin.item())
            result["references"].append([one.item() for one in references])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run["gradient_clip"])
        for group in optimizer.param_groups:
            group["lr"] = step["learning_rate"]
        optimizer.step()
        result["losses"].append(total)
        result["norms"].append(norm.item())
        result["margins"].append(sum(margins) / len(pairs))
        result["accuracies"].append(sum(margin > 0 for margin in margins))
    theirs, ours, first = load(run["trained"]).state_dict(), model.state_dict(), copy(reference)
    result["off"] = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    result["moved"] = max((ours[name] - first[name]).abs().max().item() for name in ours)
    return result


def main():
    torch.set_num_threads(1)
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    print(json.dumps({name: train(run) for name, run in runs.items()}))


if __name__ == "__main__":
    main()
