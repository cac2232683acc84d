"""Measures the speed of the codecs on one thread, beside a copy and beside other libraries.

    make bench-codec
"""

import argparse
import json
import os
import subprocess
import sys

import machine as machines
import table
from sizes import size

# 64 MiB of f32, which exceed the caches.
NUMBERS, ROUNDS = size((1 << 24, 9), (1 << 18, 1))
# The goal: the least share of the speed of a copy.
LEAST = 0.5


def lines(command, env=None):
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours(codec_speed):
    """Speeds of the codecs, and of packing."""
    printed = lines([codec_speed, str(NUMBERS), str(ROUNDS)])
    return [line for line in printed if "codec" in line], [line for line in printed if "packing" in line]


def others(folder):
    """Speeds of other libraries."""
    here = os.path.dirname(os.path.abspath(__file__))
    return lines([sys.executable, os.path.join(here, "codec_peers.py"), str(NUMBERS), str(ROUNDS)],
                 {**os.environ, "PYTHONPATH": folder})


def codec_row(line, peers):
    nearest = line["rounding"] == "nearest"
    beside = [peer for peer in peers if peer["codec"] == line["codec"]] if nearest else []
    fastest = max((peer["encode"] for peer in beside), default=None)
    share = line["encode"] / line["copy"]
    goals = []
    if line["codec"].startswith("int8") and nearest:
        goals.append(share >= LEAST)
    if fastest:
        goals.append(line["encode"] >= fastest)
    return [
        line["codec"] if nearest else f"{line['codec']}, stochastic",
        f"{line['encode']:.1f}", f"{share:.2f}", f"{line['decode']:.1f}",
        f"{line['ratio']:.2f}x", f"{100 * line['error']:.3f}%",
        f"{fastest:.1f}" if fastest else "",
        "" if not goals else "met" if all(goals) else "NOT met",
    ]


def show_codecs(codecs, peers):
    beside = ", and no codec slower than the fastest of the table below" if peers else ""
    table.show(
        "Codecs, one thread",
        f"GB/s of f32, {NUMBERS >> 20}M normally distributed numbers; a copy runs at "
        f"{codecs[0]['copy']:.1f} GB/s. Error: root mean square over that of the numbers. Goal: int8 at "
        f"least {LEAST} of a copy{beside}. {machines.line(machines.describe(sys.executable))}. Medians of {ROUNDS}.",
        ["codec", "encode", "of a copy", "decode", "fewer bytes", "error", "fastest other", "goal"],
        [codec_row(line, peers) for line in codecs],
    )


def show_others(peers):
    table.show(
        "Other libraries, one thread",
        "GB/s of f32.",
        ["as", "what", "encode", "decode", "error"],
        [[peer["codec"], peer["what"], f"{peer['encode']:.2f}", f"{peer['decode']:.2f}",
          f"{100 * peer['error']:.3f}%"] for peer in peers],
    )


def show_packings(packings, codecs):
    table.show(
        "Packing without loss, one thread",
        "GB/s of the packed bytes, in pieces of 512 KiB: numbers as above in a codec, or sums of 64 bits. "
        "Noise is the hardest input for zstd.",
        ["of", "how", "pack", "unpack", "fewer bytes", "rounded and packed, GB/s of f32"],
        [[line["of"], line["packing"], f"{line['pack']:.2f}", f"{line['unpack']:.2f}", f"{line['ratio']:.2f}x",
          rounded_and_packed(line, codecs)] for line in packings],
    )


def rounded_and_packed(packing, codecs):
    """The speed of codec and packing together; empty for sums, which have no codec."""
    for codec in codecs:
        if (codec["codec"], codec["rounding"]) == (packing["of"], "nearest"):
            return f"{1 / (1 / codec['encode'] + 1 / codec['ratio'] / packing['pack']):.2f}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec-speed", required=True, help="protocol's example codec_speed")
    parser.add_argument("--peers", required=True, help="a folder with bitsandbytes")
    options = parser.parse_args()
    codecs, packings = ours(options.codec_speed)
    peers = others(options.peers)
    show_codecs(codecs, peers)
    show_others(peers)
    show_packings(packings, codecs)


if __name__ == "__main__":
    main()
