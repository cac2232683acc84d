"""The model of a checkpoint in PyTorch: transformers' Llama, with trained boundaries where it has them."""

import json
import pathlib

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def load(folder):
    config = json.loads(pathlib.Path(folder, "config.json").read_text())
    if "boundary" not in config:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    refused_as_llama(folder)
    boundary = config.pop("boundary")
    weights = {}
    for path in pathlib.Path(folder).glob("model-*.safetensors"):
        weights |= safetensors.torch.load_file(path)
    model = LlamaForCausalLM(LlamaConfig(**(config | {"model_type": "llama"})))
    model.boundaries = nn.ModuleList(
        Boundary(boundary, config) for _ in boundary["after_layers"]
    )
    for layer, module in zip(boundary["after_layers"], model.boundaries):
        model.model.layers[layer].register_forward_hook(
            lambda _layer, _inputs, x, module=module: module(x)
        )
    names = {name.replace("shoal.boundary.", "boundaries."): name for name in weights}
    model.load_state_dict({ours: weights[name] for ours, name in names.items()})
    return model


def refused_as_llama(folder):
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        assert "shoal" in str(error), error
    else:
        raise AssertionError("transformers took it for a model that it knows")


class Boundary(nn.Module):
    """What a stage does to its output, and the next one to its input."""

    def __init__(self, boundary, config):
        super().__init__()
        hidden, self.width = config["hidden_size"], boundary["width"]
        norm = lambda size: nn.LayerNorm(size, eps=config["rms_norm_eps"], bias=False)
        self.input_norm, self.output_norm = norm(hidden), norm(self.width)
        if boundary["kind"] == "bottleneck":
            self.compress = nn.Linear(hidden, self.width, bias=False)
        else:
            assert boundary["kind"] == "maxout", boundary
            self.compress = lambda x: functional.max_pool1d(x, hidden // self.width)
        self.expand = nn.Linear(self.width, hidden, bias=False)

    def forward(self, x):
        return self.expand(self.output_norm(self.compress(self.input_norm(x))))
