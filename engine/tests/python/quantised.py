"""Writes a tiny model that bitsandbytes 0.50.2 has quantised, as transformers saves it, and the values of its matrices
(src/base/quantised/), in a folder DIR:

    pip install --target DIR --no-deps bitsandbytes==0.50.2
    PYTHONPATH=DIR python quantised.py ../../src/base/quantised

As in nf4.py its library for processors is hidden from it."""

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

from nf4 import bits, fingerprint, hide  # noqa: E402


def main(out):
    ctypes.cdll.LoadLibrary = hide
    import bitsandbytes.functional as functional

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as plain:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
        load = AutoModelForCausalLM.from_pretrained
        model = load(plain, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu")
    model.save_pretrained(out)
    (out / "generation_config.json").unlink()
    (out / "model.safetensors").chmod(0o644)
    values = {}
    for name, weight in model.named_parameters():
        if state := getattr(weight, "quant_state", None):
            values[name] = fingerprint(bits(functional.dequantize_4bit(weight.data, state)))
    (out / "golden.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
