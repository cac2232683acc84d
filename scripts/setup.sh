#!/usr/bin/env bash
# Makes a fresh clone ready to build: checks the tools, puts libtorch into .libtorch.
# Does nothing where everything is there already.
#
#   scripts/setup.sh           what cargo build and the binary need
#   scripts/setup.sh --tests   and .venv, the Python that some tests compare with
#   scripts/setup.sh --lint    and cargo-deny, rustfmt and clippy
#
# SHOAL_PYTHON names the python to use instead of python3.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly TORCH_VERSION=2.11.0
readonly CARGO_DENY_VERSION=0.20.2

# shellcheck source=scripts/setup/tools.sh
source "$ROOT/scripts/setup/tools.sh"
# shellcheck source=scripts/setup/python.sh
source "$ROOT/scripts/setup/python.sh"
# shellcheck source=scripts/setup/libtorch.sh
source "$ROOT/scripts/setup/libtorch.sh"

main() {
    local tests=no lint=no argument
    for argument in "$@"; do
        case "$argument" in
            --tests) tests=yes ;;
            --lint) lint=yes ;;
            *) fail "unknown argument $argument: use --tests, --lint or nothing" ;;
        esac
    done

    cd "$ROOT"
    # One set-up at a time: a second waits here, then finds the work done.
    exec 9<scripts/setup.sh
    flock 9

    check_machine
    check_tools
    # The tests' python brings a libtorch of its own: made first, nothing is downloaded twice.
    if [[ $tests == yes ]]; then install_test_python; fi
    install_libtorch
    if [[ $lint == yes ]]; then install_lint_tools; fi
}

main "$@"
