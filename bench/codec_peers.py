"""Speeds of other libraries' codecs on one thread: a line of JSON for each.

    python codec_peers.py NUMBERS ROUNDS

PYTHONPATH has `bitsandbytes`, whose `quantize_blockwise` is hivemind's BLOCKWISE_8BIT.
"""

import json
import statistics
import sys
import time

import torch

torch.set_num_threads(1)


def halves(dtype):
    """A cast and its inverse, into allocated memory."""
    def make(x):
        narrow, wide = torch.empty_like(x, dtype=dtype), torch.empty_like(x)
        return lambda: narrow.copy_(x), lambda: wide.copy_(narrow), lambda: wide
    return make


def blocks(size, limit, kind):
    """Blockwise quantization by PyTorch's own operations."""
    def make(x):
        rows, kept = x.view(-1, size), {}

        def encode():
            scale = rows.abs().amax(1, keepdim=True).div_(limit)
            codes = rows / scale
            kept["coded"] = (codes if kind.is_floating_point else codes.round_()).to(kind), scale

        def decode():
            codes, scale = kept["coded"]
            kept["back"] = codes.to(torch.float32).mul_(scale)
        return encode, decode, lambda: kept["back"].flatten()
    return make


def bitsandbytes(size):
    import bitsandbytes.functional as functional

    def make(x):
        kept = {}

        def encode():
            kept["coded"] = functional.quantize_blockwise(x, blocksize=size)

        def decode():
            kept["back"] = functional.dequantize_blockwise(*kept["coded"])
        return encode, decode, lambda: kept["back"]
    return make


def ways():
    yield "bf16", "torch cast", halves(torch.bfloat16)
    yield "f16", "torch cast", halves(torch.float16)
    yield "fp8", "torch cast, no scales", halves(torch.float8_e4m3fn)
    yield "fp8", "torch operations, block 64", blocks(64, 448.0, torch.float8_e4m3fn)
    yield "fp8:1024", "torch operations, block 1024", blocks(1024, 448.0, torch.float8_e4m3fn)
    yield "int8", "torch operations, block 64", blocks(64, 127.0, torch.int8)
    yield "int8:1024", "torch operations, block 1024", blocks(1024, 127.0, torch.int8)
    # Without packing two numbers into a byte.
    yield "int4", "torch operations, block 64, unpacked", blocks(64, 7.0, torch.int8)
    yield "int4:1024", "torch operations, block 1024, unpacked", blocks(1024, 7.0, torch.int8)
    try:
        yield "int8", "bitsandbytes, block 64", bitsandbytes(64)
        yield "int8:1024", "bitsandbytes, block 1024", bitsandbytes(1024)
        yield "int8:1024", "bitsandbytes, block 4096 (hivemind)", bitsandbytes(4096)
    except ImportError as error:
        print(f"bitsandbytes: {error}", file=sys.stderr)


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main():
    numbers, rounds = map(int, sys.argv[1:])
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for codec, what, make in ways():
            encode, decode, back = make(x)
            times = [(seconds(encode), seconds(decode)) for _ in range(rounds + 1)][1:]
            speed = [4e-9 * numbers / statistics.median(part) for part in zip(*times)]
            error = (x.double() - back().double()).norm() / x.double().norm()
            print(json.dumps({"codec": codec, "what": what, "encode": speed[0],
                              "decode": speed[1], "error": float(error)}), flush=True)


if __name__ == "__main__":
    main()
