"""Prints the likeliest continuation of a prompt by each model in a folder, up to its longest position, as JSON: folder,
token ids."""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM


def continued(folder, prompt):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # A random model would end anywhere.
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    result = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, use_cache=True, pad_token_id=0,
        max_length=model.config.max_position_embeddings,
    )
    return result[0, len(prompt):].tolist()


def main():
    torch.set_num_threads(1)
    folders = [path for path in sorted(pathlib.Path(sys.argv[1]).iterdir()) if (path / "config.json").exists()]
    prompt = json.loads(sys.argv[2])
    print(json.dumps({folder.name: continued(folder, prompt) for folder in folders}))


main()
