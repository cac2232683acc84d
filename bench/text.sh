#!/usr/bin/env bash
# Writes the text of the benchmarks, this project's sources, to the file that the argument names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$(dirname "$1")"
find engine protocol scheduler -name '*.rs' -print0 | sort -z | xargs -0 cat >"$1"
