"""Measures the generation of text by Shoal's engine beside transformers, both with a cache of keys and values, in f32.

    make bench-generate
    .venv/bin/python bench/generate.py --generate-speed target/release/examples/generate_speed

The shape is that of SmolLM2-135M (config.json on the Hugging Face Hub) with random weights, which both sides load
from one folder. Both choose the likeliest token. Takes 4 minutes on two cores.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile

import machine as machines
import table
from model import Model
from sizes import size
from worker import FOLDER, Worker, closing, ratio, take_turns

SHAPE = size(
    Model(
        hidden=576, layers=30, heads=9, key_value_heads=3, intermediate=1536, context=8192, batch=1,
        vocabulary=49_152, tied=True,
    ),
    Model(
        hidden=64, layers=2, heads=4, key_value_heads=2, intermediate=128, context=128, batch=1,
        vocabulary=1_000, tied=True,
    ),
)
PROMPT = size(256, 16)
TOKENS = size(128, 8)
ROUNDS = size(5, 1)
THREADS = (1, 2)
GOAL = 1.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second of one text."""

    # Of the prompt, up to the first token.
    prompt: float
    # Of the tokens after the first.
    generated: float


def write_model(folder):
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.key_value_heads,
        max_position_embeddings=SHAPE.context,
        tie_word_embeddings=SHAPE.tied,
        # With smaller ones the logits of a random model are nearly equal.
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def speed(answer):
    rest = answer["seconds"] - answer["first_seconds"]
    return Speed(prompt=PROMPT / answer["first_seconds"], generated=(TOKENS - 1) / rest)


def measure(program, folder, threads):
    """The speeds of both sides, and the share of the first text's tokens that are equal."""
    workers = {
        "Shoal": Worker([program, folder, str(threads)]),
        "transformers": Worker([sys.executable, f"{FOLDER}/torch_generate.py", folder, str(threads)]),
    }
    order = {"prompt": [index * 17 % SHAPE.vocabulary for index in range(PROMPT)], "tokens": TOKENS}
    with closing(workers.values()):
        texts = [worker.ask(**order)["tokens"] for worker in workers.values()]
        ask = {name: lambda worker=worker: speed(worker.ask(**order)) for name, worker in workers.items()}
        speeds = take_turns(ask, ROUNDS)
    equal = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
    return speeds, equal / TOKENS


def rows(threads, speeds):
    of = lambda side, kind: [getattr(speed, kind) for speed in speeds[side]]
    for kind in ("prompt", "generated"):
        ours, theirs = of("Shoal", kind), of("transformers", kind)
        share = ratio(ours, theirs)
        yield [
            threads, kind, f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", table.times(share),
            table.goal(share, GOAL) if kind == "generated" else "",
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--generate-speed", required=True, help="the example generate_speed")
    parser.add_argument("--threads", type=int, nargs="*", default=THREADS)
    options = parser.parse_args()
    lines, equal = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for threads in options.threads:
            speeds, share = measure(options.generate_speed, folder, threads)
            lines += rows(threads, speeds)
            equal.append(share)
    notes = (
        f"{SHAPE.parameters() / 1e6:.1f}M parameters, f32, {machines.line(machines.describe(sys.executable))}. "
        f"A prompt of {PROMPT} tokens and {TOKENS} more; tokens per second, median of {ROUNDS} alternated rounds. "
        f"Equal tokens: {min(equal):.0%}."
    )
    table.show("Generation", notes, ["threads", "tokens", "Shoal", "transformers", "ratio", "goal"], lines)


if __name__ == "__main__":
    main()
