"""The program shoal, and the launcher that finds the libtorch that it needs.

The program loads libtorch from the folder of `torch` beside this package: that is its run path. Where `torch` is
elsewhere on Python's path, such as in a virtual environment with the system's packages, the launcher names its folder.
It never imports torch, which takes seconds.
"""

import os
import sys

# Every import below is paid at each start.
TORCH_VERSION = "@TORCH_VERSION@"
LIBRARY = os.path.join("lib", "libtorch_cpu.so")
# The exit code of a program that cannot be used as it is.
UNUSABLE = 2


def version_of(torch):
    """The version of a folder of torch, without the part that names its build; None if it has none."""
    try:
        with open(os.path.join(torch, "version.py"), encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("__version__"):
                    return line.partition("=")[2].strip(" \n'\"").partition("+")[0]
    except OSError:
        pass
    return None


def folder_of_torch(package):
    """The folder of torch: the one beside this package, else the one that Python would import."""
    beside = os.path.join(os.path.dirname(package), "torch")
    if os.path.exists(os.path.join(beside, LIBRARY)):
        return beside
    for folder in sys.path:
        torch = os.path.join(folder, "torch")
        if os.path.exists(os.path.join(torch, LIBRARY)):
            return torch
    # An editable installation has hooks instead of a folder. This takes longer, and does not import torch either.
    from importlib.util import find_spec

    found = find_spec("torch")
    torch = os.path.dirname(found.origin) if found and found.origin else ""
    return torch if os.path.exists(os.path.join(torch, LIBRARY)) else None


def environment(package):
    """The environment of the program. Ends the process with a message if there is no libtorch for it."""
    torch = folder_of_torch(package)
    install = f"{sys.executable} -m pip install torch=={TORCH_VERSION}"
    if torch is None:
        fail(f"this Python has no torch with libtorch in it: {install}")
    found = version_of(torch)
    if found != TORCH_VERSION:
        fail(f"torch in {torch} is version {found}, and shoal needs {TORCH_VERSION}: {install}")
    if os.path.dirname(torch) == os.path.dirname(package):
        return os.environ
    others = os.environ.get("LD_LIBRARY_PATH")
    libraries = os.path.join(torch, "lib")
    return {**os.environ, "LD_LIBRARY_PATH": f"{libraries}:{others}" if others else libraries}


def fail(problem):
    """Ends the process."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(UNUSABLE)


def main():
    """Becomes the program."""
    package = os.path.dirname(os.path.realpath(__file__))
    program = os.path.join(package, "shoal")
    try:
        os.execve(program, ["shoal", *sys.argv[1:]], environment(package))
    except OSError as error:
        fail(f"{program} does not start: {error}")
