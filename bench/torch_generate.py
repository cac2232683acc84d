"""Generates on request with transformers and its cache, and reports the duration: the other side of `generate.py`.

    torch_generate.py MODEL THREADS
    {"prompt": [1, 2, 3], "tokens": 128}
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


class FirstToken:
    """A streamer that notes when the first token comes."""

    def __init__(self):
        self.time = None

    def put(self, tokens):
        # The prompt comes first, with two dimensions.
        if self.time is None and tokens.dim() == 1:
            self.time = time.perf_counter()

    def end(self):
        pass


def answer(model, order):
    prompt = torch.tensor([order["prompt"]])
    first = FirstToken()
    start = time.perf_counter()
    result = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, use_cache=True, pad_token_id=0,
        max_new_tokens=order["tokens"], streamer=first,
    )
    seconds = time.perf_counter() - start
    tokens = result[0, prompt.shape[1]:].tolist()
    return {"tokens": tokens, "first_seconds": first.time - start, "seconds": seconds}


def main():
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
    # A random model would end anywhere.
    model.generation_config.eos_token_id = None
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


main()
