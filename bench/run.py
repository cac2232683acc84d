"""Runs benchmarks of the registry: installs what they compare with, builds release programs, and measures.

    python3 bench/run.py --list
    python3 bench/run.py recovery
    python3 bench/run.py convergence --data TEXT
    python3 bench/run.py all -- --only training --rounds 1
    python3 bench/run.py --smoke --programs target/debug [NAME...]

Arguments after `--` go to the last command. Close other programs first: they share the processor's cores.
A smoke test runs every benchmark with small sizes, to see that each still works; its numbers mean nothing. It builds and
installs nothing. It prints the time of each and the end of the output of one that fails, and skips, with the reason, what
this machine lacks.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import sizes
from registry import BENCHMARKS, LIBRARIES, PROGRAMS

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parent
TOOLS = ROOT / "bench" / "results" / "tools"
PYTHON = ROOT / ".venv" / "bin" / "python"
LIMIT_SECONDS = 300
# The lines that are shown of a failure.
SHOWN_LINES = 40


def commands(benchmark, smoke):
    return benchmark.smoke or benchmark.commands if smoke else benchmark.commands


def programs_of(lines):
    """The names in `PROGRAMS` that command lines run or mention."""
    names = [line.split()[0] for line in lines] + re.findall(r"\{(\w+)\}", " ".join(lines))
    return list(dict.fromkeys(name for name in names if name in PROGRAMS))


def libraries_of(lines):
    return [name for name in LIBRARIES if f"{{{name}}}" in " ".join(lines)]


def path_of(program, programs):
    return programs / ("" if program.is_binary else "examples") / program.name


def words(line, programs, places):
    """The words of a command line, each name in braces replaced."""
    values = {**{name: path_of(program, programs) for name, program in PROGRAMS.items()},
              **{name: TOOLS / name for name in LIBRARIES}, **places}
    first, *rest = line.split()
    head = [sys.executable, str(BENCH / first)] if first.endswith(".py") else [str(values[first])]
    return [*head, *(word.format(**values) for word in rest)]


def preload(out):
    """Builds the library that changes MKL's dispatch in PyTorch."""
    out.mkdir(parents=True, exist_ok=True)
    library = out / "mkl_avx512.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, BENCH / "mkl_avx512.c"], check=True)
    return library


def build(names):
    """Builds programs as a release."""
    packages = {}
    for program in (PROGRAMS[name] for name in names):
        packages.setdefault((program.package, program.features), []).append(program)
    for (package, features), programs in packages.items():
        if any(program.is_binary for program in programs):
            subprocess.run(["make", "--no-print-directory", "build"], cwd=ROOT, check=True)
        examples = [word for program in programs if not program.is_binary for word in ("--example", program.name)]
        if examples:
            more = ["--features", features] if features else []
            subprocess.run(["cargo", "build", "--quiet", "--release", "-p", package, *more, *examples],
                           cwd=ROOT, check=True)


def install(name):
    """Puts a library into its folder."""
    library, folder = LIBRARIES[name], TOOLS / name
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder]
    commands = [[*pip, *packages.split()] for packages in library.pip]
    if library.script:
        commands.append([*library.script.split(), folder])
    for command in commands:
        subprocess.run(command, cwd=ROOT, check=not library.is_optional)


def measure(benchmark, data, more):
    """Runs a benchmark in full."""
    if benchmark.needs_text and not data:
        sys.exit(f"{benchmark.name} trains on a text: name one with DATA=FILE or --data FILE")
    lines = commands(benchmark, smoke=False)
    for name in libraries_of(lines):
        install(name)
    build(programs_of(lines))
    text = TOOLS / "text.txt"
    subprocess.run([BENCH / "text.sh", text], cwd=ROOT, check=True)
    places = {"text": text, "data": data, "plots": ROOT / "docs" / "benchmarks", "preload": preload(TOOLS)}
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    for line in lines:
        extra = more if line == lines[-1] else []
        subprocess.run([*words(line, target, places), *extra], cwd=ROOT, check=True)


def failure(benchmark, programs, places, out):
    """Runs the smoke test of a benchmark; the end of its output where it fails."""
    log = out / f"{benchmark.name}.log"
    environment = {**os.environ, sizes.VARIABLE: "1"}
    for line in commands(benchmark, smoke=True):
        with open(log, "w", encoding="utf-8") as file:
            try:
                done = subprocess.run(
                    words(line, programs, places), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                    stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS, check=False)
                ending = f"exit code {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                ending = f"not done within {LIMIT_SECONDS} s"
            except FileNotFoundError as error:
                ending = f"not built: {error.filename}"
        if ending:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join([*lines[-SHOWN_LINES:], ending])
    return None


def without_links():
    """The reason why this machine has no emulated links, if it has none."""
    if os.geteuid() != 0:
        return "emulated links need root"
    if not shutil.which("ip"):
        return "emulated links need ip (apt install iproute2)"
    return None if os.path.exists("/dev/net/tun") else "emulated links need /dev/net/tun"


def lacking(benchmark):
    """The reason why a smoke test cannot run here, if there is one."""
    if benchmark.needs_links and (reason := without_links()):
        return reason
    for name in libraries_of(commands(benchmark, smoke=True)):
        if not LIBRARIES[name].is_optional and not (TOOLS / name).exists():
            return f"{name} is not installed: make bench-{benchmark.name}"
    return None


def report(text):
    print(f"bench-smoke: {text}", flush=True)


def smoke(benchmarks, programs):
    """Runs the smoke tests; whether all passed."""
    out = ROOT / "target" / "bench-smoke"
    text = ROOT / "LICENSE-APACHE"
    places = {"text": text, "data": text, "plots": out, "preload": preload(out)}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for name in (name for name, library in LIBRARIES.items() if library.is_large):
        report(f"skipped: the comparison with {name}, a large download")
    for benchmark in benchmarks:
        if lacks := lacking(benchmark):
            counts["skipped"] += 1
            report(f"skipped: {benchmark.name}: {lacks}")
            continue
        begun = time.monotonic()
        failed = failure(benchmark, programs, places, out)
        counts["failed" if failed else "passed"] += 1
        report(f"{'FAILED' if failed else 'passed'} in {time.monotonic() - begun:5.1f} s: {benchmark.name}")
        if failed:
            print(failed, flush=True)
    report(", ".join(f"{count} {what}" for what, count in counts.items()))
    return not counts["failed"]


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the benchmarks")
    parser.add_argument("--data", default=os.environ.get("DATA"), help="the text of those that train on one")
    parser.add_argument("--smoke", action="store_true", help="run each for seconds; all where none is named")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target" / "debug",
                        help="the folder of the built programs of a smoke test")
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    known = [benchmark.name for benchmark in BENCHMARKS]
    for name in options.names:
        if name not in known:
            parser.error(f"there is no benchmark {name}: {', '.join(known)}")
    return options, arguments[end + 1:]


def main():
    options, more = parsed()
    chosen = [benchmark for benchmark in BENCHMARKS if not options.names or benchmark.name in options.names]
    if options.smoke:
        sys.exit(0 if smoke(chosen, options.programs.resolve()) else 1)
    if options.list or not options.names:
        for benchmark in BENCHMARKS:
            print(f"make bench-{benchmark.name:17} {benchmark.about}")
        return
    for benchmark in chosen:
        measure(benchmark, options.data, more)


if __name__ == "__main__":
    main()
