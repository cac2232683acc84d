#!/usr/bin/env bash
# Builds the image around the binary that `make build` made on this machine. The machine's C library must not
# be newer than the image's, which is that of Debian 12.
#
#   docker/build-from-host.sh [TAG]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly TAG=${1:-shoal} KEPT=target/image

trap 'rm -rf "$KEPT"' EXIT
docker/collect.sh target/release/shoal "$KEPT"
# Neither needs the sources.
docker build --tag shoal-runtime --target runtime --file docker/Dockerfile docker/systemd
docker build --tag "$TAG" --file docker/Dockerfile.host "$KEPT"
