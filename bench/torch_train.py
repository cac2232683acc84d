"""Trains in eager PyTorch on demand, for comparison with engine/examples/train_rounds.rs.

The argument is a model as JSON. Each line on stdin orders some steps, and each line on stdout answers, as there. An
order names the `variant` of the model, one of `VARIANTS`; with `compiled`, torch.compile compiles it, and of a mixture
`experts` names the way to compute experts. An order with `product` multiplies square matrices of that size instead.
"""

import json
import sys
import time

import torch
from model import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Model
from torch_llama import Adapted, Mixed, Stage, Transformers, loss_of
from torch_mixture import MixedMixture, Mixture

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = {
    "plain": Stage,
    "transformers": Transformers,
    "mixed": Mixed,
    "adapted": Adapted,
    "mixture": Mixture,
    "mixed-mixture": MixedMixture,
}


class Samples:
    """Random windows of a text."""

    def __init__(self, path, model, device):
        with open(path, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        self.text = text.long().to(device)
        self.model = model
        self.random = torch.Generator(device).manual_seed(1)

    def batch(self):
        """Tokens and labels, each `[batch, context]`."""
        model, device = self.model, self.text.device
        highest = len(self.text) - model.context
        shape = (model.batch, 1)
        starts = torch.randint(0, highest, shape, device=device, generator=self.random)
        windows = self.text[starts + torch.arange(model.context + 1, device=device)]
        # Bytes are spread over a larger vocabulary.
        windows = windows * (model.vocabulary // 256 or 1) % model.vocabulary
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def optimizer_of(parameters):
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


class Trainer:
    """One model and its optimizer; but for the mixed variant all in one dtype, weights and moments too."""

    def __init__(self, model, variant, dtype, device, compiled):
        torch.manual_seed(1)
        self.model = VARIANTS[variant](model).place(device, DTYPES[dtype])
        self.optimizer = optimizer_of(self.model.parameters())
        if compiled:
            self.model = torch.compile(self.model)

    def step(self, tokens, labels, microbatches):
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in zip(tokens.chunk(microbatches), labels.chunk(microbatches)):
            loss = loss_of(self.model(part[0]), part[1])
            (loss / microbatches).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total / microbatches


def multiply(size, dtype):
    """Speed of a bare matrix product, in which most of a model's time goes."""
    left, right = torch.randn(2, size, size, dtype=DTYPES[dtype])
    for _ in range(3):
        left @ right
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.5:
        left @ right
        count += 1
    return {"flops": 2 * size**3 * count / (time.perf_counter() - start)}


def main():
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(wanted.pop("threads"))
    device = torch.device(wanted.pop("device"))
    path = wanted.pop("text")
    model = Model(**wanted)
    samples = Samples(path, model, device)
    trainers = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "product" in order:
            print(json.dumps(multiply(order["product"], order["dtype"])), flush=True)
            continue
        key = (model, order["variant"], order["dtype"], device, order.get("compiled", False))
        trainer = trainers.get(key) or trainers.setdefault(key, Trainer(*key))
        if "experts" in order:
            trainer.model.compute_experts_by(order["experts"])
        start, loss = time.perf_counter(), 0.0
        for _ in range(order["steps"]):
            loss = trainer.step(*samples.batch(), order["microbatches"])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        tokens = order["steps"] * model.tokens_per_step()
        print(json.dumps({"tokens": tokens, "seconds": seconds, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
