"""Prints a checkpoint's logits as JSON, computed with PyTorch: checkpoint folder, token ids."""

import json
import sys

import torch

from model import load


def main():
    model = load(sys.argv[1])
    with torch.no_grad():
        logits = model(torch.tensor([json.loads(sys.argv[2])])).logits
    print(json.dumps(logits.flatten().tolist()))


main()
