#!/usr/bin/env python3
"""Installs a wheel as its users do, and runs it: in new virtual environments, from an index in a folder, without network.

    scripts/wheel/try.py target/wheel/shoal_swarm-*.whl [--python .venv/bin/python]
    scripts/wheel/try.py target/wheel/shoal_swarm-*.whl --into FOLDER     installs it there, and ends

The index has the wheel, and a torch that only points to the one of --python, which is too large to be installed anew.
The program runs with nothing in its environment but its own folder in PATH, so without cargo, compilers and this folder.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Seconds that a command may take.
PATIENCE = 240
# A line of a .pth file by which Python finds torch elsewhere, as an editable installation has one.
HOOK = (
    "import sys; sys.meta_path.append(type('Hook', (), dict(find_spec=staticmethod(lambda name, *_: __import__("
    "'importlib.util', fromlist=['util']).spec_from_file_location(name, {torch!r}) if name == 'torch' else None))))\n"
)
# What finding libtorch may add to the program's own start.
LAUNCH_MS = 150
TORCH_VERSION = next(
    line.partition("=")[2].strip()
    for line in (ROOT / "scripts/setup.sh").read_text().splitlines()
    if line.startswith("readonly TORCH_VERSION=")
)


def run(command, room, **options):
    """Runs a command in an empty environment; returns its exit code and all that it printed."""
    environment = {"HOME": str(room), "PATH": str(pathlib.Path(command[0]).parent), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.update(options.pop("environment", {}))
    ended = subprocess.run(
        [str(word) for word in command], cwd=room, env=environment, timeout=PATIENCE, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False, **options,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def check(command, room, *texts, code=0, **options):
    """Runs a command that must end with this code, and print these texts."""
    found, printed = run(command, room, **options)
    missing = [text for text in texts if text not in printed]
    if found != code or missing:
        sys.exit(f"{' '.join(map(str, command))}: exit code {found}, without {missing}\n{printed}")
    return printed


def make_index(wheel, site, folder):
    """An index of two projects, as pip reads it from a folder."""
    name = f"torch-{TORCH_VERSION}.dist-info"
    stand_in = folder / "torch" / f"torch-{TORCH_VERSION}-py3-none-any.whl"
    for project in ["torch", "shoal-swarm"]:
        (folder / project).mkdir(parents=True)
    with zipfile.ZipFile(stand_in, "w") as torch:
        torch.writestr("torch.pth", f"{site}\n")
        torch.writestr(f"{name}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH_VERSION}\n")
        torch.writestr(f"{name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        torch.writestr(f"{name}/RECORD", "")
    shutil.copy(wheel, folder / "shoal-swarm")
    for project in ["torch", "shoal-swarm"]:
        links = [f'<a href="{file.name}">{file.name}</a>' for file in (folder / project).iterdir()]
        (folder / project / "index.html").write_text("\n".join(links))


def environment_of(python, room, name):
    """A new virtual environment; the folder of its programs."""
    folder = room / name
    subprocess.run([python, "-m", "venv", folder], check=True, env={"PATH": os.environ["PATH"]})
    return folder / "bin"


def link_torch(site, target):
    """Puts torch and what it loads into a folder of packages, as if they were installed there."""
    for name in ["torch", "nvidia"]:
        if (site / name).exists():
            (target / name).symlink_to(site / name)


def purelib(python, room, **options):
    """Where a Python installs packages."""
    return pathlib.Path(check([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], room, **options).strip())


def milliseconds(command, room, environment=None):
    """The shortest of some starts."""
    times = []
    for _ in range(5):
        begun = time.monotonic()
        check(command, room, environment=environment or {})
        times.append(1000 * (time.monotonic() - begun))
    return min(times)


def install(python, wheel, site, room):
    """Has pip take shoal and its torch from an index; the folder of the environment's programs."""
    make_index(wheel, site, room / "index")
    programs = environment_of(python, room, "indexed")
    index = (room / "index").as_uri()
    check([programs / "python", "-m", "pip", "install", "--index-url", index, "shoal-swarm"], room, "Successfully installed")
    return programs


def from_index(python, wheel, site, room):
    """torch is elsewhere on Python's path."""
    programs = install(python, wheel, site, room)
    shoal = programs / "shoal"
    print(check([shoal, "--version", "-v"], room, "shoal 0.", TORCH_VERSION), end="")
    check([programs / "python", "-m", "shoal_swarm", "--version"], room, "shoal 0.")
    print(check([shoal, "doctor", "--listen", "127.0.0.1:0"], room, "libtorch", "memory", "disk", "UDP port"), end="")
    demo = ["demo", "--peers", "2", "--steps", "4", "--out", room / "demo"]
    print(check([shoal, *demo], room, "identical").splitlines()[-1])


def beside(python, wheel, site, room):
    """torch is beside the package: the run path of the program is enough. A link to it works, as pipx and uv make one."""
    programs = environment_of(python, room, "beside")
    pip = [programs / "python", "-m", "pip", "install", "--no-index", "--no-deps"]
    check([*pip, wheel], room, "Successfully installed")
    shoal = programs / "shoal"
    check([shoal, "--version"], room, f"pip install torch=={TORCH_VERSION}", code=2)
    packages = purelib(programs / "python", room)
    (packages / "torch/lib").mkdir(parents=True)
    (packages / "torch/lib/libtorch_cpu.so").touch()
    (packages / "torch/version.py").write_text("__version__ = '2.10.0+cpu'\n")
    check([shoal, "--version"], room, "is version 2.10.0", f"needs {TORCH_VERSION}", code=2)
    shutil.rmtree(packages / "torch")
    hook = packages / "hook.pth"
    hook.write_text(HOOK.format(torch=str(site / "torch/__init__.py")))
    check([shoal, "--version"], room, "shoal 0.")
    hook.unlink()
    link_torch(site, packages)
    (room / "links").mkdir()
    (room / "links/shoal").symlink_to(shoal)
    check([room / "links/shoal", "--version", "-v"], room, "shoal 0.", TORCH_VERSION)
    program = packages / "shoal_swarm/shoal"
    check([program, "--version"], room, "shoal 0.")
    check([shoal, "demo", "--peers", "1", "--steps", "2", "--out", room / "beside-demo"], room, "identical")
    launched, alone = milliseconds([shoal, "--version"], room), milliseconds([program, "--version"], room)
    print(f"start: {launched:.0f} ms, of which finding libtorch {launched - alone:.0f} ms")
    if launched - alone > LAUNCH_MS:
        sys.exit(f"finding libtorch takes more than {LAUNCH_MS} ms")


def of_a_user(python, wheel, site, room):
    """`pip install --user`, also where the system manages its packages."""
    user = {"PYTHONUSERBASE": str(room / "user"), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    base = check([python, "-c", "import sys; print(sys._base_executable)"], room).strip()
    pip = [base, "-m", "pip", "install", "--user", "--no-index", "--no-deps"]
    check([*pip, wheel], room, "Successfully installed", environment=user)
    packages = check([base, "-m", "site", "--user-site"], room, environment=user).strip()
    link_torch(site, pathlib.Path(packages))
    check([room / "user/bin/shoal", "--version"], room, "shoal 0.", environment=user)


def main():
    """Tries each way of installing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--python", type=pathlib.Path, default=ROOT / ".venv/bin/python")
    parser.add_argument("--into", type=pathlib.Path, help="install the wheel below this folder, and print its program")
    arguments = parser.parse_args()
    wheel, python = arguments.wheel.resolve(), arguments.python.absolute()
    with tempfile.TemporaryDirectory() as room:
        room = pathlib.Path(room).resolve()
        site = purelib(python, room).resolve()
        if not (site / "torch").exists():
            sys.exit(f"{python} has no torch of its own: scripts/setup.sh --tests")
        if arguments.into:
            print(install(python, wheel, site, arguments.into.resolve()) / "shoal")
            return
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        from_index(python, wheel, site, room)
        beside(python, wheel, site, room)
        of_a_user(python, wheel, site, room)


if __name__ == "__main__":
    main()
