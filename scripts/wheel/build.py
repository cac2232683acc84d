#!/usr/bin/env python3
"""Writes the wheel of a program: the program without debug information, its launcher, dashboards and licences.

    scripts/wheel/build.py target/release/shoal --out target/wheel

The wheel needs torch in the version of scripts/setup.sh. Its platform tag says which C library the program needs. The
same program gives the same bytes. Needs only Python's own library, and objcopy and readelf of binutils.
"""

import argparse
import base64
import hashlib
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NAME = "shoal_swarm"
# libtorch in the torch that is installed beside the package.
RUN_PATH = b"$ORIGIN/../torch/lib"
# The newest GLIBCXX that a machine with a glibc has, by Ubuntu 20.04, 22.04 and 24.04.
CXX_OF_GLIBC = {(2, 31): (3, 4, 28), (2, 35): (3, 4, 30), (2, 39): (3, 4, 33)}
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
# Files for others: of Prometheus, Grafana and systemd.
SHARED = {
    "docker/grafana/dashboards": "grafana",
    "docker/prometheus/alerts.yml": "prometheus",
    "docker/prometheus/recording.yml": "prometheus",
    "docker/systemd/shoal.service": "systemd",
}
DESCRIPTION = """\
Shoal trains one transformer over many unreliable machines that come and go.

    pip install shoal-swarm
    shoal doctor                  # what this machine has, and what is missing
    shoal demo                    # train a small model with several local processes
    shoal finetune MODEL DATA     # fine-tune a model; prints the command for other machines

Linux with glibc {glibc} or newer; a GPU is optional.
"""


def first(pattern, path):
    """What a file says in the first match."""
    found = re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)
    if not found:
        sys.exit(f"{path} has no match of {pattern}")
    return found.group(1)


def readelf(program, *flags):
    """What readelf prints of a program."""
    return subprocess.run(["readelf", "--wide", *flags, program], check=True, capture_output=True, text=True).stdout


def newest(versions, name):
    """The newest version of a library that a program asks for."""
    found = re.findall(rf"Name: {name}_([0-9.]+) ", versions)
    return max((tuple(map(int, text.split("."))) for text in found), default=())


def platform(program):
    """The platform tag, and the glibc in words."""
    machine = re.search(r"Machine:\s*(.+)", readelf(program, "--file-header")).group(1).strip()
    if machine not in MACHINES:
        sys.exit(f"{program} is for {machine}: wheels are for {', '.join(MACHINES)}")
    versions = readelf(program, "--version-info")
    glibc, cxx = newest(versions, "GLIBC"), newest(versions, "GLIBCXX")
    fitting = [known for known, most in CXX_OF_GLIBC.items() if known >= glibc and most >= cxx]
    if not fitting:
        sys.exit(f"{program} needs glibc {glibc} and GLIBCXX {cxx}: build it on an older system, such as Debian 12")
    major, minor = min(fitting)
    return f"manylinux_{major}_{minor}_{MACHINES[machine]}", f"{major}.{minor}"


def table(program, name):
    """Where a section of an ELF file begins."""
    row = re.search(rf" {re.escape(name)}\s+\S+\s+[0-9a-f]+ ([0-9a-f]+) ", readelf(program, "--section-headers"))
    return int(row.group(1), 16)


def set_run_path(program):
    """Replaces the run path, which names a folder of this machine, by one that is relative to the program.

    The new text lies at the end of the old one, so that names that share its last letters keep them.
    """
    content = bytearray(program.read_bytes())
    dynamic, strings = table(program, ".dynamic"), table(program, ".dynstr")
    run_path, end = 29, 0
    for place in range(dynamic, len(content), 16):
        tag, value = struct.unpack_from("<qQ", content, place)
        if tag == end:
            sys.exit(f"{program} has no run path")
        if tag == run_path:
            break
    last = content.index(b"\0", strings + value)
    begin = last - len(RUN_PATH)
    if begin < strings + value:
        sys.exit(f"the run path of {program} is shorter than {RUN_PATH.decode()}: build in a folder with a longer name")
    content[begin:last] = RUN_PATH
    struct.pack_into("<qQ", content, place, run_path, begin - strings)
    program.write_bytes(content)


def metadata(version, torch, glibc):
    """METADATA."""
    lines = [
        "Metadata-Version: 2.1",
        "Name: shoal-swarm",
        f"Version: {version}",
        "Summary: Train one transformer over many unreliable machines",
        "License: MIT OR Apache-2.0",
        "Requires-Python: >=3.10",
        f"Requires-Dist: torch=={torch}",
        "Classifier: Operating System :: POSIX :: Linux",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join([*lines, "", DESCRIPTION.format(glibc=glibc)])


def files(program, version, torch):
    """Names and contents of the wheel, and its tag."""
    tag, glibc = platform(program)
    tag = f"py3-none-{tag}"
    info, shared = f"{NAME}-{version}.dist-info", f"{NAME}-{version}.data/data/share/shoal"
    package = pathlib.Path(__file__).parent / NAME
    content = {f"{NAME}/shoal": program.read_bytes()}
    for source in sorted(package.glob("*.py")):
        content[f"{NAME}/{source.name}"] = source.read_bytes().replace(b"@TORCH_VERSION@", torch.encode())
    for source, folder in SHARED.items():
        found = ROOT / source
        for file in sorted(found.iterdir()) if found.is_dir() else [found]:
            content[f"{shared}/{folder}/{file.name}"] = file.read_bytes()
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"]:
        content[f"{info}/licenses/{licence}"] = (ROOT / licence).read_bytes()
    content[f"{info}/METADATA"] = metadata(version, torch, glibc).encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    content[f"{info}/entry_points.txt"] = f"[console_scripts]\nshoal = {NAME}:main\n".encode()
    content[f"{info}/RECORD"] = record(content, f"{info}/RECORD")
    return content, tag


def record(content, own):
    """RECORD: each file with its hash and size."""
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()


def write(path, content):
    """Writes the files as a wheel."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == f"{NAME}/shoal" else 0o100644) << 16
            wheel.writestr(entry, data)


def main():
    """Builds a wheel and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target/wheel")
    arguments = parser.parse_args()
    version = first(r'^version = "(.+)"$', "Cargo.toml")
    torch = first(r"^readonly TORCH_VERSION=(.+)$", "scripts/setup.sh")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
        program = pathlib.Path(scratch) / "shoal"
        # The names of functions stay, for backtraces.
        subprocess.run(["objcopy", "--strip-debug", arguments.program, program], check=True)
        set_run_path(program)
        content, tag = files(program, version, torch)
    path = arguments.out / f"{NAME}-{version}-{tag}.whl"
    write(path, content)
    print(path)


if __name__ == "__main__":
    main()
