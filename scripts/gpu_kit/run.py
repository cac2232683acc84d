"""Runs a kit on a machine with a GPU: bits, tiers and speed, the most valuable first. Each step has its own limit. What
ran is in the JSON file as soon as it has ended.

    python3 run.py OUT [--stand-in FOLDER]

On a stand-in for CUDA, figures mean nothing, and the file says so."""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

from steps import all_steps

LIMIT = 8 * 60
# For the last table.
RESERVE = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--stand-in", metavar="FOLDER")
    given = parser.parse_args()
    kit = pathlib.Path(__file__).resolve().parent
    environment = with_libraries(given.stand_in)
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"figures": "meaningless: a stand-in" if given.stand_in else "of this machine's GPU", "steps": []}
    begun = time.monotonic()
    for step in all_steps(kit, sys.executable, given.stand_in):
        left = LIMIT - RESERVE - (time.monotonic() - begun)
        result["steps"].append(run(step, left, environment))
        print(line(result["steps"][-1]), flush=True)
        (given.out / "gpu-kit.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    table = "\n".join(line(one) for one in result["steps"])
    (given.out / "gpu-kit.txt").write_text(f"figures: {result['figures']}\n{table}\n", encoding="utf-8")
    failed = [one["name"] for one in result["steps"] if one["state"] == "failed"]
    if failed:
        raise SystemExit(f"gpu-kit: failed: {', '.join(failed)}")


def with_libraries(stand_in):
    """The environment in which programs find this Python's libtorch."""
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit("gpu-kit: this Python has no torch: run it with one that has torch 2.11.0")
    library = str(pathlib.Path(torch.origin).parent / "lib")
    folders = [stand_in, library] if stand_in else [library]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders), "SHOAL_TEST_DEVICE": "cuda:0", "RUST_BACKTRACE": "0"}


def run(step, left, environment):
    """Runs a step within its limit and the time that is left. Returns its state and what it found."""
    done = {"name": step.name, "state": "skipped", "seconds": 0.0}
    if left < 10:
        return {**done, "why": "no time is left"}
    if not os.path.exists(step.command[0]):
        return {**done, "why": f"the kit has no {os.path.basename(step.command[0])}"}
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            step.command, input="".join(f"{order}\n" for order in step.orders), env=environment,
            capture_output=True, text=True, timeout=min(step.limit, left), check=False,
        )
    except subprocess.TimeoutExpired as late:
        return {**done, "state": "out of time", "seconds": late.timeout}
    done["seconds"] = time.monotonic() - begun
    answers = [json.loads(text) for text in ended.stdout.splitlines() if text.startswith("{")]
    if ended.returncode != 0 or "running 0 tests" in ended.stdout:
        tail = (ended.stdout + ended.stderr).splitlines()[-12:]
        # A peer that this Python lacks is no failure.
        lacks = any("ModuleNotFoundError" in text for text in tail)
        return {**done, "state": "skipped" if lacks else "failed", "why": "\n".join(tail)}
    return {**done, "state": "passed", "found": answers[-1] if answers else summary(ended.stdout)}


def summary(text):
    """The last line that says something."""
    lines = [one.strip() for one in text.splitlines() if one.strip()]
    results = [one for one in lines if one.startswith("test result")]
    return (results or lines or [""])[-1]


def line(one):
    found = one.get("found", one.get("why", ""))
    if isinstance(found, dict) and "tokens" in found:
        found = f"{found['tokens'] / found['seconds']:,.0f} tokens/s, loss {found['loss']:.4f}"
    return f"{one['name']:36} {one['state']:12} {one['seconds']:6.1f} s  {str(found).splitlines()[0] if found else ''}"


if __name__ == "__main__":
    main()
