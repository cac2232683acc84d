"""The machine of the measurements."""

import os
import pathlib
import platform
import re
import subprocess

# The limits of glibc's allocator that the node sets itself (engine/src/device/setup.rs), for examples.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
}


def processor():
    """The processor's name in /proc/cpuinfo."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"model name\s*:\s*(.*)", file.read())
    return found[1] if found else platform.processor()


def flags():
    """The processor's extensions that select the kernels."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"flags\s*:\s*(.*)", file.read())
    known = set(found[1].split()) if found else set()
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in known]


def mkl_dispatch():
    """The kernels that Shoal has MKL use for f32 products; none where there is no release build."""
    target = os.environ.get("CARGO_TARGET_DIR", pathlib.Path(__file__).parent.parent / "target")
    shoal = pathlib.Path(target) / "release" / "shoal"
    if not shoal.exists():
        return None
    answer = subprocess.run([shoal, "--version", "-v"], check=True, capture_output=True, text=True)
    return re.search(r"MKL dispatch\s+(.*)", answer.stdout)[1]


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Without an import of torch, which takes seconds.
TORCH_VERSION = """
import importlib.util, pathlib, runpy
path = pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")
print(runpy.run_path(str(path))["__version__"])
"""


def torch_version(python):
    command = [python, "-c", TORCH_VERSION]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def describe(python):
    """The machine as plain data."""
    return {
        "processor": processor(),
        "extensions": flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "system": platform.platform(),
        "torch": torch_version(python),
        "mkl_dispatch": mkl_dispatch(),
        "load_at_start": os.getloadavg()[0],
    }


def line(machine):
    """The machine in one line, for the notes of a table."""
    dispatch = machine["mkl_dispatch"] or "unknown"
    return (
        f"{machine['cores']} cores of {machine['processor']} ({', '.join(machine['extensions'])}), "
        f"torch {machine['torch']}, MKL dispatch of Shoal: {dispatch}"
    )
