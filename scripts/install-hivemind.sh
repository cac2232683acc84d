#!/usr/bin/env bash
# Installs hivemind, which only a benchmark needs, into a folder of its own beside the PyTorch of .venv.
#
#   scripts/install-hivemind.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:?where to}
stamp=$folder/.installed-1.1.12
[[ -e $stamp ]] && exit 0
rm -rf "$folder"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$folder")
# With its dependencies it would bring another PyTorch.
"${pip[@]}" --no-deps hivemind==1.1.12
"${pip[@]}" PyYAML scipy prefetch_generator msgpack sortedcontainers uvloop grpcio-tools 'protobuf>=5.29' \
    configargparse py-multihash cryptography 'pydantic>=2' packaging varint base58 netaddr idna py-cid
touch "$stamp"
