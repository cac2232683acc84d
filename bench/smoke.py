"""Runs every benchmark with small sizes, to see that each still works. The numbers that they print mean nothing.

    make bench-smoke
    .venv/bin/python bench/smoke.py --programs target/debug --only links

Prints a line with the time of each, and the end of the output of one that fails. Skips, with the reason,
what this machine lacks: root and emulated links, or other libraries to compare with.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

import sizes

BENCH = pathlib.Path(__file__).parent
ROOT = BENCH.parent
LIMIT_SECONDS = 300
# The lines that are shown of a failure.
SHOWN_LINES = 40


@dataclasses.dataclass(frozen=True)
class Check:
    """A benchmark, with the arguments of its smoke test."""

    name: str
    # A script of this folder, or the name of an example.
    program: str
    arguments: list = dataclasses.field(default_factory=list)
    needs_links: bool = False
    # The library without which it is skipped, in the folder of its name.
    needs_library: str = ""


def checks(programs, out):
    """All benchmarks, in the order of the Makefile."""
    example = lambda name: str(programs / "examples" / name)
    shoal = ["--shoal", str(programs / "shoal")]
    network = ["--network", example("emulated_network")]
    speed, plain = ["--speed", example("transport_speed")], ["--plain", example("plain_speed")]
    arithmetic = ["--arithmetic", example("round_speed")]
    trains = ["--train-rounds", example("train_rounds")]
    codec = ["--codec-speed", example("codec_speed")]
    text = str(ROOT / "LICENSE-APACHE")
    return [
        Check("bench", "bench.py", [*shoal, *trains, "--preload", str(preload(out)), "--text", text, *codec,
                                    *speed, *plain, *arithmetic]),
        Check("recovery", "recovery.py", shoal),
        Check("overhead", "overhead.py", [*shoal, "--bare", example("bare_driver")]),
        Check("codec", "codec.py", [*codec, "--peers", installed("peers")]),
        Check("all-reduce", "all_reduce.py", [*shoal, *speed, *arithmetic]),
        Check("all-reduce in virtual time", "all_reduce", ["10"]),
        Check("all-reduce over links", "all_reduce.py", [*shoal, *network], needs_links=True),
        Check("links", "links.py", [*shoal, *network], needs_links=True),
        Check("transport", "transport.py", [*speed, *plain, *network], needs_links=True),
        Check("convergence", "convergence.py", [*shoal, "--data", text, "--plot", str(out / "plot.svg")]),
        Check("subspace", "subspace.py", [*shoal, "--data", text]),
        Check("workers", "workers.py", [*shoal, "--data", text, "--plot", str(out / "workers.svg")]),
        Check("syncs", "syncs.py", [*shoal, *network], needs_links=True),
        Check("span choice", "span_choice.py", [*shoal, *network], needs_links=True),
        Check("staleness", "staleness.py", [*shoal, "--data", text, "--plot", str(out / "staleness.svg")]),
        Check("prepare", "prepare.py", [*shoal, "--datasets", installed("datasets")], needs_library="datasets"),
        Check("swap", "swap.py", shoal),
        Check("island", "island.py", [*shoal, "--text", text]),
        Check("generate", "generate.py", ["--generate-speed", example("generate_speed")]),
        Check("chunks", "chunks.py", ["--speed", example("chunk_speed"), *plain, *network], needs_links=True),
        Check("placement", "placement", ["1", "1", "1"]),
        Check("watching", "watching.py", shoal),
        Check("hostile", "hostile.py", [*shoal, "--hostile", example("hostile")]),
        Check("schedules", "schedules"),
        Check("routing", "routing", ["1"]),
        Check("uneven", "uneven.py", [*shoal, "--simulator", example("uneven")]),
        Check("storm in virtual time", "storm", ["10"]),
        Check("storm", "storm.py", shoal),
        Check("rebalance", "rebalance", ["1", "1", "16", "g4dn"]),
        Check("scale", "scale", ["50", "--until", "130"]),
    ]


def installed(folder):
    """A folder in which a `make bench-*` installs other libraries."""
    return str(ROOT / "bench" / "results" / "tools" / folder)


def preload(out):
    """Builds the library that changes MKL's dispatch in PyTorch."""
    library = out / "mkl_avx512.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, BENCH / "mkl_avx512.c"], check=True)
    return library.resolve()


def command(check, programs):
    if check.program.endswith(".py"):
        return [sys.executable, str(BENCH / check.program), *check.arguments]
    return [str(programs / "examples" / check.program), *check.arguments]


def failure(check, programs, out):
    """Runs a benchmark; the end of its output where it fails."""
    log = out / f"{check.name.replace(' ', '-')}.log"
    environment = {**os.environ, sizes.VARIABLE: "1"}
    with open(log, "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command(check, programs), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS, check=False)
            ending = f"exit code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            ending = f"not done within {LIMIT_SECONDS} s"
        except FileNotFoundError as error:
            ending = f"not built: {error.filename}"
    if not ending:
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([*lines[-SHOWN_LINES:], ending])


def without_links():
    """The reason why this machine has no emulated links, if it has none."""
    if os.geteuid() != 0:
        return "emulated links need root"
    if not shutil.which("ip"):
        return "emulated links need ip (apt install iproute2)"
    return None if os.path.exists("/dev/net/tun") else "emulated links need /dev/net/tun"


def lacking(check, links):
    """The reason why a check cannot run here, if there is one; `links` is that of the emulated links."""
    if check.needs_links and links:
        return links
    library = check.needs_library
    if library and not pathlib.Path(installed(library), library).exists():
        return f"{library} is not installed: make bench-{check.name}"
    return None


def report(text):
    print(f"bench-smoke: {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target" / "release",
                        help="the folder of the built binary and its examples")
    parser.add_argument("--only", help="the benchmarks with this in their name")
    options = parser.parse_args()
    programs = options.programs.resolve()
    out = ROOT / "target" / "bench-smoke"
    out.mkdir(parents=True, exist_ok=True)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for library in ("hivemind", "torchft"):
        report(f"skipped: the comparison with {library}, a large download")
    links = without_links()
    for check in checks(programs, out):
        if options.only and options.only not in check.name:
            continue
        lacks = lacking(check, links)
        if lacks:
            counts["skipped"] += 1
            report(f"skipped: {check.name}: {lacks}")
            continue
        begun = time.monotonic()
        failed = failure(check, programs, out)
        counts["failed" if failed else "passed"] += 1
        report(f"{'FAILED' if failed else 'passed'} in {time.monotonic() - begun:5.1f} s: {check.name}")
        if failed:
            print(failed, flush=True)
    report(", ".join(f"{count} {what}" for what, count in counts.items()))
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
