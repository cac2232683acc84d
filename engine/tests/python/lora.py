"""Trains adapters with PEFT on given batches, and compares with trained exports.

The argument is a JSON file: by name the folders of the model, of its first adapters, of the trained ones and of the
merged model, and the batches."""

import json
import pathlib
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from reference import train


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits.flatten().tolist()


def adapters(model):
    return {name: weight.detach() for name, weight in model.named_parameters() if "lora_" in name}


def keep_blocks(model):
    """Joined gates and values have one adapter, of twice the rank: keeps apart what two adapters have."""
    for name, module in model.named_modules():
        if getattr(module, "parameter_name", None) != "gate_up_proj":
            continue
        weight = module.lora_B["default"].weight
        outputs, ranks = weight.shape
        mask = torch.zeros(outputs, 2, ranks // 2)
        mask[: outputs // 2, 0] = 1
        mask[outputs // 2 :, 1] = 1
        weight.register_hook(lambda gradient, mask=mask.flatten(1): gradient * mask)


def check(run):
    model = PeftModel.from_pretrained(load(run["source"]), run["first"], is_trainable=True)
    keep_blocks(model)
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trainable and all("lora_" in name for name in trainable), trainable
    result = train(model, run)
    trained = PeftModel.from_pretrained(load(run["source"]), run["trained"])
    theirs, ours = adapters(model), adapters(trained)
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    result["off"] = max((theirs[name] - ours[name]).abs().max().item() for name in theirs)
    result["moved"] = max(weight.abs().max().item() for name, weight in ours.items() if "lora_B" in name)
    result["logits"] = logits(trained, run["tokens"])
    merged = load(run["merged"])
    result["merged_logits"] = logits(merged, run["tokens"])
    whole = trained.merge_and_unload().state_dict()
    assert whole.keys() == merged.state_dict().keys()
    result["merged_off"] = max((whole[name] - weight).abs().max().item() for name, weight in merged.state_dict().items())
    return result


def main():
    torch.set_num_threads(1)
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    print(json.dumps({name: check(run) for name, run in runs.items()}))


main()
