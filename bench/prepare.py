"""Measures the speed and the memory of `shoal data prepare` beside Hugging Face's `datasets`.

    make bench-prepare
    .venv/bin/python bench/prepare.py --shoal target/release/shoal --datasets DIR --tokenizer DIR --megabytes 200

The text repeats this project's sources and documentation; each document has a number, so that no two are equal.
Both sides read the same JSONL, tokenize with the same tokenizer, end each document with the same token, and write
packed rows. Needs free disk for eight times the text.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import machine as machines
import table
from sizes import size
from worker import FOLDER

ROOT = pathlib.Path(FOLDER).parent
MEGABYTES = size(2000, 1)
CONTEXT = 1024
# Letters of a document, without its number.
LETTERS = 4000
# The shares of the text that are prepared; two of them show whether the memory grows.
SHARES = size((0.25, 1), (1,))
POLL_SECONDS = 0.1


@dataclasses.dataclass
class Measured:
    """A command that has ended."""

    seconds: float
    # Processor seconds of all its processes.
    processor: float
    # Sum of the peaks of resident memory (VmHWM) of the command and all its children, in bytes.
    peak: int
    # The largest sum at one time of memory that no file backs; what processes share counts once.
    anonymous: int
    output: str


def real_text():
    """The sources and the documentation of this project."""
    paths = sorted(path for pattern in ("docs/**/*.md", "*.md", "*/src/**/*.rs") for path in ROOT.glob(pattern))
    paths = [path for path in paths if "target" not in path.relative_to(ROOT).parts]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def write_source(path, text, megabytes):
    """Writes JSONL of so many megabytes. Gives the number of documents."""
    parts = [text[start: start + LETTERS] for start in range(0, len(text), LETTERS)]
    written = 0
    with open(path, "w", encoding="utf-8") as out:
        for number, part in enumerate(itertools.cycle(parts)):
            if written >= megabytes * 1e6:
                return number
            written += out.write(json.dumps({"text": f"Document {number}\n\n{part}"}, ensure_ascii=False) + "\n")


def small_tokenizer(text, folder):
    """Trains a tokenizer, for where no other is given."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|end|>"])
    tokenizer.train_from_iterator([text[:500_000]], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def make_base(shoal, tokenizer, folder):
    """Imports a tiny random model with the tokenizer: `shoal data prepare` reads the tokenizer of a base."""
    import transformers

    transformers.logging.disable_progress_bar()
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=CONTEXT, eos_token_id=fast.eos_token_id, bos_token_id=fast.bos_token_id)
    model, base = folder / "model", folder / "base"
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    fast.save_pretrained(model)
    subprocess.run([shoal, "import", model, "-o", base], check=True, capture_output=True)
    return model, base


def measure(command):
    """Runs a command and samples the memory of its processes."""
    begun, before = time.monotonic(), used()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
        peaks, anonymous = {}, 0
        while process.poll() is None:
            together = 0
            for pid in tree(process.pid):
                peak, own = memory(pid)
                peaks[pid] = max(peaks.get(pid, 0), peak)
                together += own
            anonymous = max(anonymous, together)
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - begun
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{text[-3000:]}")
    return Measured(seconds, used() - before, sum(peaks.values()), anonymous, text)


def used():
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tree(pid):
    """A process and all its descendants."""
    yield pid
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def memory(pid):
    """The peak of a process, and its share of the memory that no file backs, in bytes; nothing if it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0, 0
    return kilobytes(status, "VmHWM"), kilobytes(rollup, "Pss_Anon")


def kilobytes(text, key):
    line = next((line for line in text.splitlines() if line.startswith(f"{key}:")), "x 0")
    return int(line.split()[1]) * 1024


def ours(shoal, base, source, out, threads):
    command = [shoal, "data", "prepare", source, "--tokenizer", base, "--context", CONTEXT, "--held-out", "0",
               "--threads", threads, "--shard-bytes", "64MiB", "-o", out]
    measured = measure(command)
    totals = json.loads((out / "index.json").read_text(encoding="utf-8"))["train_totals"]
    # A row has the token after its last one too, so that rows overlap by one: the first token of all is no label.
    return measured, totals["targets"] + totals["masked"] + 1


def theirs(datasets, model, source, out, processes):
    command = [sys.executable, f"{FOLDER}/prepare_peers.py", datasets, model, source, out, CONTEXT, processes]
    measured = measure(command)
    return measured, json.loads(measured.output.splitlines()[-1])["tokens"]


def contest(options, text, megabytes):
    """Both sides on a text of so many megabytes. Gives what was measured of each, tokens and documents."""
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="shoal-prepare-", dir=options.scratch) as name:
        folder = pathlib.Path(name)
        tokenizer = options.tokenizer
        if not tokenizer:
            tokenizer = folder / "tokenizer"
            small_tokenizer(text, tokenizer)
        model, base = make_base(options.shoal, tokenizer, folder)
        source = folder / "source.jsonl"
        documents = write_source(source, text, megabytes)
        shoal, tokens = ours(options.shoal, base, source, folder / "data", threads)
        peer, counted = theirs(options.datasets, model, source, folder / "datasets", threads)
    if tokens != counted:
        raise SystemExit(f"Shoal made {tokens:,} tokens and datasets {counted:,} of {documents:,} documents")
    return {"Shoal": shoal, "datasets": peer}, tokens, documents


def row(who, megabytes, measured, tokens, beside):
    return [
        who, f"{megabytes:g} MB", f"{measured.seconds:.1f} s", f"{measured.processor:.1f} s",
        table.rate(tokens / measured.seconds), table.times(beside.seconds / measured.seconds),
        table.megabytes(measured.peak), table.megabytes(measured.anonymous),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shoal", type=pathlib.Path, default=ROOT / "target" / "release" / "shoal")
    parser.add_argument("--datasets", type=pathlib.Path, required=True, help="a folder with datasets")
    parser.add_argument("--tokenizer", type=pathlib.Path,
                        help="a folder with tokenizer.json; without it, a small one is trained on the text")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="size of the larger text")
    parser.add_argument("--scratch", type=pathlib.Path, help="a folder for temporary files, eight times the text")
    options = parser.parse_args()
    options.shoal = options.shoal.resolve()
    if options.tokenizer and not (options.tokenizer / "tokenizer.json").exists():
        options.tokenizer = None
    text, rows = real_text(), []
    for megabytes in (options.megabytes * share for share in SHARES):
        measured, tokens, documents = contest(options, text, megabytes)
        for who, one in measured.items():
            rows.append(row(who, megabytes, one, tokens, measured["datasets"]))
    threads, processor = len(os.sched_getaffinity(0)), machines.processor()
    tokenizer = options.tokenizer.name if options.tokenizer else "a small one, trained on the text"
    table.show(
        "Preparing data",
        f"JSONL to packed rows of {CONTEXT} tokens; {threads} threads and {threads} processes; tokenizer: {tokenizer}. "
        f"The text repeats {len(text) / 1e6:.1f} MB of this project's sources and documentation; each of the "
        f"{documents:,} documents has a number of its own. Both sides made {tokens:,} tokens of the larger text. Whole "
        "commands, with their start. Peak: VmHWM, summed over the processes of a side. Anonymous: the largest sum at "
        f"one time of memory that no file backs. {threads} cores of {processor}.",
        ["contender", "text", "time", "processor", "tokens/s", "to datasets", "peak", "anonymous"],
        rows,
    )


if __name__ == "__main__":
    main()
