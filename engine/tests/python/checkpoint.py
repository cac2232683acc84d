"""Loads a checkpoint with transformers and prints its logits as JSON: checkpoint folder, token ids."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main():
    folder, tokens = sys.argv[1], json.loads(sys.argv[2])
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for what in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        assert not report[what], (what, report[what])
    GenerationConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ["plain", "Zwölf Boxkämpfer\n\tjagen  Viktor", "日本 🐟", " a\r\n\x00\x7f ", ""]:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode()), (text, ids)
        assert tokenizer.decode(ids) == text, (text, tokenizer.decode(ids))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    print(json.dumps(logits.flatten().tolist()))


main()
