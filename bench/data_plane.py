"""The headlines of what carries and adds up: bytes over loopback, numbers rounded for a link, an all-reduce.

`make bench-transport`, `make bench-codec` and `make bench-all-reduce` have the rest.
"""

import argparse

import all_reduce
import codec
import transport

# Millions of values, and peers.
CASE = (10, 4)


def measure(tools):
    """Prints the tables; gives what is in them."""
    codecs, packings = codec.ours(tools.codec_speed)
    codec.show_codecs(codecs, [])
    alone = argparse.Namespace(shoal=tools.shoal, hivemind=None, speed=tools.speed, arithmetic=tools.arithmetic)
    return {
        "bulk": transport.loopback(tools),
        "codecs": codecs,
        "packings": packings,
        "all_reduce": all_reduce.loopback(alone, [CASE]),
    }
