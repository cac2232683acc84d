"""Table of attention over packed documents on a processor: one layer of SmolLM2-135M's shape, both passes, one thread.

All rows are calls of libtorch from Python, the same that the engine makes: its attention document by document
(engine/csrc/attention.cpp), the mask of all pairs that it made before, and what PyTorch does with documents that are
padded to the longest. The layer's other products are the same in all, and so counted once.
"""

import argparse
import statistics
import time

import table
import torch
from machine import processor
from sizes import size
from torch.nn.functional import linear, scaled_dot_product_attention

TOKENS = size(8192, 256)
ROUNDS = size(3, 1)
# Mean tokens of a document.
MEANS = size((512,), (64,))
HIDDEN, HEADS, GROUPS, HEAD, INNER = 576, 9, 3, 64, 1536
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def documents(mean, generator):
    """Lengths of exponential distribution that fill a row."""
    lengths = []
    while sum(lengths) < TOKENS:
        drawn = torch.empty(()).exponential_(1 / mean, generator=generator)
        lengths.append(min(int(drawn) + 1, TOKENS - sum(lengths)))
    return lengths


def heads(x):
    """`[tokens, heads, D]` as attention reads it."""
    return x.unsqueeze(0).transpose(1, 2)


def by_document(parts, gradient, lengths):
    """Both passes of each document by itself."""
    for *inputs, of_output in zip(*(part.split(lengths) for part in (*parts, gradient))):
        inputs, of_output = [heads(part) for part in inputs], heads(of_output)
        output, sums = FORWARD(*inputs, 0.0, True)
        BACKWARD(of_output, *inputs, output, sums, 0.0, True)


def masked(parts, gradient, lengths):
    """Both passes of the row, with a mask of all pairs of its tokens."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (numbers[:, None] == numbers).tril()
    leaves = [heads(part).requires_grad_() for part in parts]
    scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True).backward(heads(gradient))


def padded(parts, gradient, lengths):
    """Both passes of a batch of the documents, each padded to the longest."""
    batch = [
        torch.nn.utils.rnn.pad_sequence(part.split(lengths), batch_first=True).transpose(1, 2)
        for part in (*parts, gradient)
    ]
    leaves = [part.requires_grad_() for part in batch[:3]]
    scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).backward(batch[3])


def products(dtype):
    """Both passes of the layer's products with matrices."""
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    for outputs, inputs in (
        ((HEADS + 2 * GROUPS) * HEAD, HIDDEN), (HIDDEN, HEADS * HEAD), (2 * INNER, HIDDEN), (HIDDEN, INNER)):
        matrix = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
        read = x.new_ones(TOKENS, inputs).requires_grad_()
        linear(read, matrix).backward(x.new_ones(TOKENS, outputs))


def seconds(work, *arguments):
    """Time of one call."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def measure(dtype, mean):
    """The median time of each way, in turns, and of the products."""
    generator = torch.Generator().manual_seed(1)
    lengths = documents(mean, generator)
    parts = [torch.randn(TOKENS, count, HEAD).to(dtype) for count in (HEADS, GROUPS, GROUPS)]
    gradient = torch.randn(TOKENS, HEADS, HEAD).to(dtype)
    times = {way: [] for way in (by_document, masked, padded, products)}
    for _ in range(ROUNDS):
        for way, found in times.items():
            found.append(seconds(way, dtype) if way is products else seconds(way, parts, gradient, lengths))
    *ways, rest = (statistics.median(found) for found in times.values())
    row = [str(dtype).removeprefix("torch."), f"{len(lengths)}"]
    row += [f"{1e3 * way:,.0f}" for way in ways] + [f"{TOKENS / (way + rest):,.0f}" for way in ways]
    return [*row, table.times(ways[1] / ways[0]), table.times(ways[2] / ways[0])]


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    rows = [measure(dtype, mean) for dtype in (torch.float32, torch.bfloat16) for mean in MEANS]
    head = ["dtype", "documents", "by document", "mask", "padded", "by document, tokens/s", "mask", "padded",
            "mask to by document", "padded to by document"]
    notes = f"{TOKENS} tokens of documents, one layer, one thread, {processor()}: attention in ms, the layer in tokens/s."
    table.show("Attention over packed documents", notes, head, rows)


if __name__ == "__main__":
    main()
