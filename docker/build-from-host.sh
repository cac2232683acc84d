#!/usr/bin/env bash
# Builds the image around the binary that `make build` made on this machine (Debian 12 or older inside means:
# the machine's C library must not be newer than the image's).
#
#   docker/build-from-host.sh [TAG]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly TAG=${1:-shoal}

trap 'rm -rf target/image' EXIT
docker/collect.sh target/release/shoal target/image
DOCKER_BUILDKIT=1 docker build -f docker/Dockerfile -t "$TAG" --build-arg BINARY=host .
