"""Moving pictures: PNG files as the frames of one animated PNG, which every browser shows.

Format: the PNG specification, third edition, section 11.3.6.
"""

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunks(png):
    """The chunks of a PNG: their types and contents."""
    if png[:8] != SIGNATURE:
        raise ValueError("this is no PNG")
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at:at + 4])
        yield png[at + 4:at + 8], png[at + 8:at + 8 + length]
        at += 12 + length


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def animated(frames, seconds):
    """One animated PNG of PNG files of one size, each shown for so long, from the start again without end."""
    header = {content for frame in frames for kind, content in chunks(frame) if kind == b"IHDR"}
    if len(header) != 1:
        raise ValueError("the frames differ in size or colours")
    (header,) = header
    width, height = struct.unpack(">II", header[:8])
    milliseconds = round(1000 * seconds)
    out = [SIGNATURE, chunk(b"IHDR", header), chunk(b"acTL", struct.pack(">II", len(frames), 0))]
    number = 0
    for index, frame in enumerate(frames):
        control = struct.pack(">IIIIIHHBB", number, width, height, 0, 0, milliseconds, 1000, 0, 0)
        out.append(chunk(b"fcTL", control))
        number += 1
        for content in (content for kind, content in chunks(frame) if kind == b"IDAT"):
            if index == 0:
                out.append(chunk(b"IDAT", content))
            else:
                out.append(chunk(b"fdAT", struct.pack(">I", number) + content))
                number += 1
    out.append(chunk(b"IEND", b""))
    return b"".join(out)
