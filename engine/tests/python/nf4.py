"""Writes the golden values of packed matrices (src/numeric/nf4/golden.json), computed by bitsandbytes 0.50.2 in a folder DIR:

    pip install --target DIR --no-deps bitsandbytes==0.50.2
    PYTHONPATH=DIR python nf4.py > ../../src/numeric/nf4/golden.json

Its library for processors looks scales up in a table that is not exact, unlike its kernels for GPUs and its reference in
Python. So the library is hidden from it."""

import ctypes
import json
import os
import struct
import sys

# A compiler might round products and sums as one.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402


def hide(*_, **__):
    raise OSError("hidden")


def values(seed, count):
    """Numbers with few bits from a generator that tests have too."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        high = state >> 40
        numbers.append((high - 2**23) / 2**23 * (0.01 + (state >> 33 & 7) / 64))
    return torch.tensor(numbers, dtype=torch.float64).float()


def fingerprint(data):
    """FNV-1a of 64 bits."""
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return f"{digest:016x}"


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def case(functional, seed, shape, dtype):
    weights = values(seed, shape[0] * shape[1]).reshape(shape).to(dtype)
    packed, state = functional.quantize_4bit(weights, blocksize=64, compress_statistics=True, quant_type="nf4")
    unpacked = functional.dequantize_4bit(packed, state)
    assert unpacked.dtype == dtype and unpacked.shape == weights.shape
    error = (unpacked.float() - weights.float()).abs().mean() / weights.float().abs().mean()
    return {
        "seed": seed,
        "shape": shape,
        "dtype": "bf16" if dtype == torch.bfloat16 else "f32",
        "mean": struct.unpack("<I", bits(state.offset.reshape(1)))[0],
        "magnitudes": [struct.unpack("<I", bits(one.reshape(1)))[0] for one in state.state2.absmax],
        "scales": bits(state.absmax).hex(),
        "codes": fingerprint(bits(packed)),
        "first_codes": bits(packed)[:32].hex(),
        "unpacked": fingerprint(bits(unpacked)),
        "first_unpacked": unpacked.float().flatten()[:8].tolist(),
        "error": error.item(),
    }


def main():
    ctypes.cdll.LoadLibrary = hide
    import bitsandbytes.functional as functional

    shapes = [(1, 64), (3, 30), (8, 32), (64, 256), (130, 128)]
    shapes = [(seed + 1, shape, dtype) for seed, shape in enumerate(shapes) for dtype in (torch.float32, torch.bfloat16)]
    cases = [case(functional, *one) for one in shapes]
    levels = [struct.unpack("<I", bits(one.reshape(1)))[0] for one in functional.create_dynamic_map()]
    json.dump({"scale_levels": levels, "cases": cases}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
