#!/usr/bin/env bash
# Builds Shoal as a release and measures it beside PyTorch, with and without MKL's AVX-512 kernels: the speed of one
# process and of a swarm, traffic, memory, and throughput of the data plane. Prints tables, and writes all numbers to
# bench/results/latest.json. Close other programs first: they share the processor's cores.
#
#   bench/run.sh                   everything, at most 15 minutes on two cores
#   bench/run.sh --only training   one process only
#   bench/run.sh --only real       one process with a real model's shape only
#   bench/run.sh --only swarm      the swarm only
#   bench/run.sh --only data       the data plane only
#   bench/run.sh --rounds 1        a quick look
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh --tests
target=${CARGO_TARGET_DIR:-target}
tools=bench/results/tools
mkdir -p "$tools"

cargo build --quiet --release -p shoal-node
cargo build --quiet --release -p shoal-engine --example train_rounds --example round_speed
cargo build --quiet --release -p shoal-protocol --features net \
    --example codec_speed --example transport_speed --example plain_speed
cc -O2 -shared -fPIC -o "$tools/mkl_avx512.so" bench/mkl_avx512.c
bench/text.sh "$tools/text.txt"

exec .venv/bin/python bench/bench.py \
    --shoal "$target/release/shoal" \
    --train-rounds "$target/release/examples/train_rounds" \
    --preload "$PWD/$tools/mkl_avx512.so" \
    --text "$PWD/$tools/text.txt" \
    --codec-speed "$target/release/examples/codec_speed" \
    --speed "$target/release/examples/transport_speed" \
    --plain "$target/release/examples/plain_speed" \
    --arithmetic "$target/release/examples/round_speed" \
    "$@"
