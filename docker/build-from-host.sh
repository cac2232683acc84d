#!/usr/bin/env bash
# Builds the image around a binary of this machine: SHOAL, or target/release/shoal. The machine's C library must
# not be newer than the image's, which is that of Debian 12.
#
#   docker/build-from-host.sh [TAG] [SHOAL]
set -euo pipefail

SHOAL=$(realpath "${2:-$(dirname "${BASH_SOURCE[0]}")/../target/release/shoal}")
readonly SHOAL
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly TAG=${1:-shoal} KEPT=target/image

trap 'rm -rf "$KEPT"' EXIT
docker/collect.sh "$SHOAL" "$KEPT"
# Neither image needs the sources.
docker build --tag shoal-runtime --target runtime --file docker/Dockerfile docker/systemd
docker build --tag "$TAG" --file docker/Dockerfile.host "$KEPT"
