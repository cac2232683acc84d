"""Trains a checkpoint on given batches with PyTorch alone and prints the losses as JSON, and how far
its weights end from those of another checkpoint.

The one argument is a JSON file: both checkpoints' folders, per step the microbatches' inputs and labels, the
learning rate and, from the step on at which they change, AdamW's betas, how many versions old the weights are that a step reads, and AdamW's constants."""

import json
import sys

import torch

from model import load


def main():
    with open(sys.argv[1]) as file:
        run = json.load(file)
    torch.set_num_threads(1)
    model = load(run["checkpoint"])
    start = copy(model)
    result = train(model, run)
    theirs = load(run["trained"]).state_dict()
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    result["off"] = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    result["moved"] = max((ours[name] - start[name]).abs().max().item() for name in ours)
    print(json.dumps(result))


def adamw(model, run):
    """The optimizer with the run's constants."""
    def decays(name, weight):
        # The biases of all experts of a layer are one matrix in some models.
        return weight.dim() > 1 and not name.endswith("_bias")

    matrices = [weight for name, weight in model.named_parameters() if decays(name, weight)]
    vectors = [weight for name, weight in model.named_parameters() if not decays(name, weight)]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": run["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(run["beta1"], run["beta2"]),
        eps=run["epsilon"],
    )


def train(model, run, optimizer=None):
    """Trains the model, and returns each step's loss and gradient norm. A label of -100 does not count; the loss
    of a step is the mean over those that do."""
    optimizer = optimizer or adamw(model, run)
    losses, norms = [], []
    versions = [copy(model)]
    for number, step in enumerate(run["steps"]):
        optimizer.zero_grad()
        if run["staleness"]:
            model.load_state_dict(versions[max(0, number - run["staleness"])])
        labels = [torch.tensor(batch["labels"]).flatten() for batch in step["microbatches"]]
        counted = sum((label >= 0).sum().item() for label in labels)
        total = 0.0
        for batch, label in zip(step["microbatches"], labels):
            output = model(torch.tensor(batch["inputs"]), **attention(batch))
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), label, reduction="sum") / counted
            total += loss.item()
            if getattr(output, "aux_loss", None) is not None:
                loss = loss + balance_loss(model, output) * (label >= 0).sum() / counted
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run["gradient_clip"])
        for group in optimizer.param_groups:
            group["lr"] = step["learning_rate"]
            group["betas"] = step.get("betas", group["betas"])
        if run["staleness"]:
            model.load_state_dict(versions[number])
        optimizer.step()
        if run["staleness"]:
            versions.append(copy(model))
        losses.append(total)
        norms.append(norm.item())
    return {"losses": losses, "norms": norms}


def balance_loss(model, output):
    """The auxiliary loss of each layer by itself, and the mean of them. That of transformers is of all layers at once."""
    count, chosen = model.num_experts, model.num_experts_per_tok
    losses = []
    for logits in output.router_logits:
        shares = logits.float().softmax(-1)
        loads = torch.bincount(shares.topk(chosen, -1).indices.flatten(), minlength=count) / len(shares)
        losses.append(count * (loads * shares.mean(0)).sum())
    if len(losses) == 1:
        assert torch.allclose(losses[0], output.aux_loss), (losses, output.aux_loss)
    return model.router_aux_loss_coef * torch.stack(losses).mean()


def attention(batch):
    """The mask of attention within documents, if the batch numbers them."""
    if "documents" not in batch:
        return {}
    documents = torch.tensor(batch["documents"])
    length = documents.shape[1]
    same = documents[:, None, :] == documents[:, :, None]
    causal = torch.tril(torch.ones(length, length, dtype=torch.bool))
    return {"attention_mask": torch.where(same & causal, 0.0, torch.finfo(torch.float32).min)[:, None]}


def copy(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


if __name__ == "__main__":
    main()
