"""Makes the models in a folder less monotonous, writes them to another, and prints the likeliest continuation of a prompt by
each, up to 128 tokens, as JSON: folder, other folder, token ids."""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

# A small random model repeats a token: its layers change little of what they read.
FACTOR = 3
POSITIONS = 128
# With a cache, transformers keeps keys that were rotated by the wavelengths of a shorter text.
UNCACHED = ("-dynamic", "llama-longrope")
UNSCALED = ("embed", "wte", "lm_head")


def continued(folder, out, prompt):
    # transformers packs weights again that it has read packed, and rounds them.
    unpacked = folder / "unpacked"
    model = AutoModelForCausalLM.from_pretrained(unpacked if unpacked.exists() else folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not any(part in name for part in UNSCALED):
                weight.mul_(FACTOR)
    model.save_pretrained(out)
    # A random model would end anywhere.
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    result = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
        use_cache=not folder.name.endswith(UNCACHED), max_length=POSITIONS,
    )
    return result[0, len(prompt):].tolist()


def main():
    torch.set_num_threads(1)
    source, out = (pathlib.Path(argument) for argument in sys.argv[1:3])
    prompt = json.loads(sys.argv[3])
    print(json.dumps({path.name: continued(path, out / path.name, prompt) for path in sorted(source.iterdir())}))


main()
