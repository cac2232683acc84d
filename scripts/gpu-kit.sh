#!/usr/bin/env bash
# Packs a kit: one file with what scripts/check-gpu.sh --kit runs on a machine with a GPU and torch 2.11.0 in any Python,
# without Rust and without a network.
#
#   scripts/gpu-kit.sh PROGRAMS FILE
#
# PROGRAMS is the folder of a build: target/release, or target/debug for a trial. Programs and tests are stripped. A
# program that is not there is left out, and the steps that need it say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
programs=${1:?usage: gpu-kit.sh PROGRAMS FILE}
file=${2:?usage: gpu-kit.sh PROGRAMS FILE}
readonly MOST=$((40 * 1000 * 1000))

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
kit=$folder/gpu-kit
mkdir "$kit"
add() {
    if [[ -x $1 ]]; then strip --strip-all -o "$kit/$2" "$1"; else echo "gpu-kit: no $1: left out"; fi
}
add "$programs/shoal" shoal
add "$programs/examples/train_rounds" train_rounds
# Cargo's newest program of the engine's tests: that of `cargo test -p shoal-engine --test integration --no-run`.
newest=
for test in "$programs"/deps/integration-*; do
    if [[ -x $test && ! -d $test && $test -nt ${newest:-/} ]] && grep -qa device_memory "$test"; then newest=$test; fi
done
add "${newest:-$programs/deps/integration}" tests
cp scripts/gpu_kit/*.py bench/{check_gpu,model,sizes,table,torch_llama,torch_train,worker}.py "$kit"
find engine protocol scheduler -name '*.rs' -print0 | sort -z | xargs -0 cat >"$kit/text.txt"

mkdir -p "$(dirname "$file")"
tar -C "$folder" -c gpu-kit | xz -"${SHOAL_KIT_XZ:-6}" -T0 >"$file"
size=$(stat -c %s "$file")
printf 'gpu-kit: %s has %d bytes\n' "$file" "$size"
# A debug build is larger, and nobody sends it anywhere.
if [[ $programs == *release* ]] && ((size > MOST)); then
    echo "gpu-kit: that is more than $MOST" >&2
    exit 1
fi
