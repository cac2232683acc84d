"""Prints the weights after 50 steps of each optimizer from the same gradients, and the rates of each schedule, as JSON.

    pip install --no-deps --target DIR timm==1.0.22 lion-pytorch==0.2.5
    PYTHONPATH=DIR python optimizers.py > ../../src/optimizer/golden.json

AdamW, SGD, Muon and Adafactor are those of torch.optim; Lion is that of lion-pytorch; LAMB and LARS are those of timm,
which scale weights with decay alone. Rates are those of torch.optim.lr_scheduler. torch.optim.Muon takes its
Newton-Schulz steps in bf16; "muon" takes the same steps in f32, and "muon_bf16" is torch.optim.Muon as it is."""

import importlib.util
import json
import sys
import types

import torch
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.optim import lr_scheduler as schedulers

STEPS = 50
WARMUP = 5
CLIP = 1.0
SHAPES = {
    "model.embed_tokens.weight": [12, 6],
    "model.layers.0.self_attn.q_proj.weight": [6, 6],
    "model.layers.0.mlp.up_proj.weight": [10, 6],
    "model.layers.0.mlp.down_proj.weight": [6, 10],
    "model.layers.0.input_layernorm.weight": [6],
}
SCHEDULES = {
    "cosine": {"schedule": "cosine", "final_learning_rate": 0.1},
    "linear": {"schedule": "linear", "final_learning_rate": 0.0},
    "wsd": {"schedule": "wsd", "final_learning_rate": 0.05, "decay_steps": 20},
    "constant": {"schedule": "constant"},
}


def numbers(seed, count):
    """Numbers from -0.5 to 0.5 that f32 holds exactly."""
    values = []
    for _ in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        values.append((seed >> 8) / 2**24 - 0.5)
    return values


def fill(seed, scale):
    """Numbers for every weight."""
    values = numbers(seed, sum(torch.Size(shape).numel() for shape in SHAPES.values()))
    tensors, start = {}, 0
    for name, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        tensors[name] = (torch.tensor(values[start : start + count]) * scale).view(shape)
        start += count
    return tensors


def rates(schedule, peak):
    """The rate of every step."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    parts = [schedulers.LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)]
    milestones = [WARMUP]
    lowest = schedule.get("final_learning_rate", 0.0) * peak
    length = STEPS - 1 - WARMUP
    if schedule["schedule"] == "cosine":
        parts.append(schedulers.CosineAnnealingLR(optimizer, length, lowest))
    elif schedule["schedule"] == "linear":
        parts.append(schedulers.LinearLR(optimizer, 1.0, lowest / peak, length))
    else:
        parts.append(schedulers.ConstantLR(optimizer, 1.0))
    if schedule["schedule"] == "wsd":
        parts.append(schedulers.LinearLR(optimizer, 1.0, lowest / peak, schedule["decay_steps"]))
        milestones.append(STEPS - 1 - schedule["decay_steps"])
    whole = schedulers.SequentialLR(optimizer, parts, milestones)
    values = []
    for _ in range(STEPS):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return values


def with_peak(schedule, peak):
    """The keys of a schedule whose final rate is relative to the peak."""
    keys = {"learning_rate": peak, "warmup_steps": WARMUP, **schedule}
    if "final_learning_rate" in keys:
        keys["final_learning_rate"] *= peak
    return keys


def modules(package, names):
    """Modules of a package's optimizers, without what else the package imports."""
    for parent in (package, f"{package}.optim"):
        found = importlib.util.find_spec(parent)
        stub = types.ModuleType(parent)
        stub.__path__ = list(found.submodule_search_locations)
        sys.modules[parent] = stub
    return [importlib.import_module(f"{package}.optim.{name}") for name in names]


def groups(weights, decay):
    """Matrices with decay, and vectors without."""
    weights = list(weights)
    return [
        {"params": [one for one in weights if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in weights if one.dim() == 1], "weight_decay": 0.0},
    ]


def train(build, schedule, peak):
    """Trains, and returns the weights. An optimizer's rate follows that of the schedule."""
    weights = {name: torch.nn.Parameter(values) for name, values in fill(1, 0.25).items()}
    optimizers = build(weights)
    for step, rate in enumerate(rates(schedule, peak)):
        gradients = fill(100 + step, 0.5 if step % 4 == 0 else 0.1875)
        for name, weight in weights.items():
            weight.grad = gradients[name]
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        for optimizer, factor in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
    return {name: weight.detach().flatten().tolist() for name, weight in weights.items()}


def split(weights):
    """The matrices of the layers, and all other weights."""
    inner = {name for name, one in weights.items() if one.dim() == 2 and "layers" in name}
    return [weights[name] for name in inner], [one for name, one in weights.items() if name not in inner]


def muon(rate_scale, nesterov, in_f32):
    """Muon with AdamW for the rest, at a tenth of the rate."""

    def build(weights):
        inner, rest = split(weights)
        torch.optim._muon._zeropower_via_newtonschulz = newton_schulz if in_f32 else AS_IT_IS
        return [
            (Muon(inner, lr=1.0, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=rate_scale), 1.0),
            (AdamW(groups(rest, 0.1), lr=1.0, betas=(0.9, 0.999), eps=1e-8, foreach=False), 0.1),
        ]

    return build


AS_IT_IS = torch.optim._muon._zeropower_via_newtonschulz


def newton_schulz(matrix, coefficients, steps, epsilon):
    """The steps of torch.optim.Muon, in f32."""
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if is_tall else matrix).clone()
    x.div_(x.norm().clamp(min=epsilon))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def alone(optimizer):
    """An optimizer for all weights."""
    return lambda weights: [(optimizer(weights.values()), 1.0)]


def main():
    torch.set_num_threads(1)
    lamb, lars = modules("timm", ["lamb", "lars"])
    from lion_pytorch import Lion

    # The rule's keys, weight decay, schedule, highest rate, and the reference.
    cases = {
        "adamw": (
            {"kind": "adamw", "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
            (0.1, "cosine", 3e-3),
            alone(lambda all: AdamW(groups(all, 0.1), betas=(0.9, 0.95), eps=1e-8, foreach=False)),
        ),
        "sgd": (
            {"kind": "sgd", "momentum": 0.9, "nesterov": False},
            (0.01, "linear", 0.05),
            alone(lambda all: SGD(groups(all, 0.01), lr=1.0, momentum=0.9, foreach=False)),
        ),
        "sgd_nesterov": (
            {"kind": "sgd", "momentum": 0.8, "nesterov": True},
            (0.01, "wsd", 0.05),
            alone(lambda all: SGD(groups(all, 0.01), lr=1.0, momentum=0.8, nesterov=True, foreach=False)),
        ),
        "sgd_plain": (
            {"kind": "sgd", "momentum": 0.0, "nesterov": False},
            (0.01, "constant", 0.05),
            alone(lambda all: SGD(groups(all, 0.01), lr=1.0, foreach=False)),
        ),
        "lion": (
            {"kind": "lion", "beta1": 0.9, "beta2": 0.99},
            (0.1, "wsd", 1e-3),
            alone(lambda all: Lion(groups(all, 0.1), lr=1.0, betas=(0.9, 0.99))),
        ),
        "muon": (muon_keys("original", True), (0.1, "wsd", 0.02), muon("original", True, True)),
        "muon_matched": (
            muon_keys("match_rms_adamw", False),
            (0.1, "cosine", 0.02),
            muon("match_rms_adamw", False, True),
        ),
        "muon_bf16": (muon_keys("original", True), (0.1, "wsd", 0.02), muon("original", True, False)),
        "lamb": (
            {"kind": "lamb", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6},
            (0.01, "linear", 0.01),
            alone(lambda all: lamb.Lamb(groups(all, 0.01), lr=1.0, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=None)),
        ),
        "lars": (
            {"kind": "lars", "momentum": 0.9, "trust_coefficient": 0.02, "epsilon": 1e-8},
            (0.01, "cosine", 0.5),
            alone(lambda all: lars.Lars(groups(all, 0.01), lr=1.0, momentum=0.9, trust_coeff=0.02, eps=1e-8)),
        ),
        "adafactor": (
            {"kind": "adafactor", "decay_exponent": 0.8, "epsilon": 1e-15, "scale_epsilon": 1e-3, "clip_threshold": 1.0},
            (0.01, "constant", 0.05),
            alone(
                lambda all: Adafactor(
                    groups(all, 0.01), lr=1.0, beta2_decay=-0.8, eps=(1e-15, 1e-3), d=1.0, foreach=False
                )
            ),
        ),
    }
    result = {"steps": STEPS, "shapes": list(SHAPES.items()), "cases": {}, "schedules": {}}
    for name, (keys, (decay, schedule, peak), build) in cases.items():
        schedule = SCHEDULES[schedule]
        common = {**with_peak(schedule, peak), "weight_decay": decay, "gradient_clip": CLIP}
        result["cases"][name] = {
            "optimizer": {**keys, **common},
            "weights": train(build, schedule, peak),
        }
    for name, schedule in SCHEDULES.items():
        result["schedules"][name] = {"keys": with_peak(schedule, 3e-3), "rates": rates(schedule, 3e-3)}
    print(json.dumps(result))


def muon_keys(rate_scale, nesterov):
    return {
        "kind": "muon",
        "momentum": 0.95,
        "nesterov": nesterov,
        "rate_scale": rate_scale,
        "rest_learning_rate": 0.002,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
    }


if __name__ == "__main__":
    main()
