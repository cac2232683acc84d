# shellcheck shell=bash
# The python that pip runs in, and .venv, the one that tests compare Shoal with.

PYTHON=${SHOAL_PYTHON:-python3}
readonly TEST_REQUIREMENTS=scripts/test-requirements.txt

# Python is needed only to install; what is installed runs without it.
check_python() {
    if libtorch_is_ready && test_python_is_ready; then return; fi
    if ! command -v "$PYTHON" >/dev/null; then
        say "$PYTHON is missing: $(as_root)apt install python3 python3-pip python3-venv"
        return 1
    fi
    "$PYTHON" -m pip --version >/dev/null 2>&1 && return
    say "$PYTHON has no pip: $(as_root)apt install python3-pip"
    return 1
}

# pip_install PYTHON SCRATCH ARGUMENT... keeps pip's temporary files in SCRATCH, on our own disk.
pip_install() {
    local python=$1 scratch=$2
    shift 2
    mkdir -p "$scratch"
    TMPDIR=$scratch PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
        "$python" -m pip install --no-input --no-cache-dir "$@" >&2 \
        || fail "pip could not install: check the network and the index that pip uses (pip config list), then run this again"
    rm -rf "$scratch"
}

# Prints the folder that holds a python's torch, where it is the version that we need.
torch_folder() {
    "$1" - "$TORCH_VERSION" 2>/dev/null <<'PYTHON'
import importlib.metadata, importlib.util, os, sys
if importlib.metadata.version("torch").split("+")[0] != sys.argv[1]:
    sys.exit(1)
print(os.path.dirname(importlib.util.find_spec("torch").origin))
PYTHON
}

test_python_is_ready() {
    [[ -x .venv/bin/python ]] && cmp -s "$TEST_REQUIREMENTS" .venv/installed-requirements.txt
}

install_test_python() {
    test_python_is_ready && return
    check_test_python_version
    # An unfinished one is of no use; a finished one only takes what has changed.
    if [[ ! -x .venv/bin/python || -e .venv/unfinished ]]; then make_virtual_environment; fi
    if ! torch_folder .venv/bin/python >/dev/null; then
        say "downloading PyTorch $TORCH_VERSION and transformers for the tests into .venv: 2.8 GB, 4.9 GB on disk"
        need_space 8000 "the tests' Python"
    fi
    pip_install .venv/bin/python "$ROOT/.venv/scratch" -r "$TEST_REQUIREMENTS"
    say "checking .venv"
    .venv/bin/python - "$TORCH_VERSION" <<'PYTHON' || fail ".venv does not work: remove it and run this again"
import sys
import numpy, safetensors, tokenizers, torch
from transformers import AutoModelForCausalLM
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
PYTHON
    rm -f .venv/unfinished
    cp "$TEST_REQUIREMENTS" .venv/installed-requirements.txt
}

check_test_python_version() {
    "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' && return
    fail "PyTorch $TORCH_VERSION needs Python 3.10 to 3.14, $PYTHON is $("$PYTHON" -V): name one with SHOAL_PYTHON=..."
}

make_virtual_environment() {
    local torch
    rm -rf .venv
    mkdir .venv
    touch .venv/unfinished
    "$PYTHON" -m venv .venv >/dev/null 2>&1 \
        || fail "$PYTHON cannot make virtual environments: $(as_root)apt install python3-venv"
    # A torch that is there already, perhaps built for this machine's GPU, is used as it is.
    if torch=$(torch_folder "$PYTHON"); then
        say ".venv uses the PyTorch in $torch"
        dirname "$torch" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    fi
}
