#!/usr/bin/env bash
# The checks that need an NVIDIA GPU; skipped, with the reason, where there is none.
#
#   same bits   a swarm of two peers on one GPU, and one process on it: equal checkpoint hashes
#   sums        over NCCL, by one GPU and by several: the bits of one device
#   islands     replicas and slices on two GPUs, or as two workers of one: the state of one worker
#   slices      a run of four slices on several GPUs: the checkpoint of one GPU
#   tiers       weights that are on the GPU only while passes read them: the state of resident ones, and their speed
#   speed       tokens/s and MFU of a larger model in bf16, beside eager PyTorch
#
# check-gpu.sh --kit FILE [OUT] runs a kit of `make gpu-kit` instead: it needs a Python with torch 2.11.0 (SHOAL_PYTHON, or
# python3), and neither Rust nor a network. It ends within 8 minutes, and leaves gpu-kit.json and gpu-kit.txt in OUT. With
# SHOAL_STAND_IN, the folder of a stand-in for CUDA, it needs no GPU, and its figures mean nothing.
set -euo pipefail

if [[ ${1:-} == --kit ]]; then
    file=${2:?usage: check-gpu.sh --kit FILE [OUT]}
    python=${SHOAL_PYTHON:-python3}
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # By Python: the machine may have no xz.
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$file" "$folder"
    "$python" "$folder/gpu-kit/run.py" "${3:-gpu-kit-out}" ${SHOAL_STAND_IN:+--stand-in "$SHOAL_STAND_IN"}
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip() {
    printf 'check-gpu: skipped: %s\n' "$*"
    exit 0
}

command -v nvidia-smi >/dev/null || skip "no CUDA device here (no nvidia-smi)"
gpus=$(nvidia-smi -L 2>/dev/null) || skip "no CUDA device here (nvidia-smi finds no driver)"
[[ $gpus == GPU* ]] || skip "no CUDA device here (nvidia-smi lists none)"

scripts/setup.sh --tests
.venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || skip "the PyTorch in .venv finds no CUDA device: is the driver older than its CUDA?"

devices=$(sed -n 's/^GPU \([0-9]*\):.*/cuda:\1/p' <<<"$gpus" | paste -sd,)
cargo test --quiet -p shoal-engine --lib collectives
SHOAL_TEST_DEVICE=$devices cargo test --quiet -p shoal-engine --test integration -- compute_the_bits_of_one
SHOAL_TEST_DEVICE=cuda:0 cargo test --quiet -p shoal-engine --test integration -- device_memory::

target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --release -p shoal-node
cargo build --quiet --release -p shoal-engine --example train_rounds
tools=bench/results/tools
mkdir -p "$tools"
find engine protocol scheduler -name '*.rs' -print0 | sort -z | xargs -0 cat >"$tools/text.txt"

exec .venv/bin/python bench/check_gpu.py \
    --shoal "$target/release/shoal" \
    --train-rounds "$target/release/examples/train_rounds" \
    --text "$PWD/$tools/text.txt"
