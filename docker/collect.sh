#!/usr/bin/env bash
# Collects a binary and the libraries that it loads, but for the system's own, into a folder laid out as
# the root of an image: the binary finds libtorch where it was built, so the libraries keep their paths.
#
#   docker/collect.sh target/release/shoal FOLDER
set -euo pipefail

readonly BINARY=$1 FOLDER=$2

rm -rf "$FOLDER"
mkdir -p "$FOLDER"

# What ldd finds of a file outside the system's folders.
loads() {
    ldd "$1" | awk '$3 ~ "^/" && $3 !~ "^/(lib|lib64|usr)/" { print $3 }' | xargs --no-run-if-empty realpath --no-symlinks
}

keep() {
    xargs --no-run-if-empty cp --dereference --parents --target-directory "$FOLDER"
}

loads "$BINARY" | keep
# libtorch's CUDA half is loaded only where there is a GPU; the wheel for processors lacks it.
libtorch=$(loads "$BINARY" | grep -m 1 '/libtorch_cpu\.so$')
torch=${libtorch%/lib/*}
if [[ ${WITH_CUDA:-no} == yes ]]; then
    [[ -e $torch/lib/libtorch_cuda.so ]] || { echo "$torch has no CUDA half" >&2; exit 1; }
    { echo "$torch/lib/libtorch_cuda.so"; loads "$torch/lib/libtorch_cuda.so"; } | sort -u | keep
    # These are loaded by name when they are first needed.
    find "${torch%/torch}/nvidia" \( -name 'libcudnn_*.so*' -o -name 'libnvrtc*.so*' \) | keep
fi
# Licences go with the libraries.
find "${torch%/torch}" -maxdepth 1 \( -name 'torch-*.dist-info' -o -name 'nvidia_*.dist-info' \) -print0 \
    | xargs --null --no-run-if-empty cp --recursive --parents --target-directory "$FOLDER"
# Without debug information, and with the names of functions, for backtraces.
install -D --target-directory "$FOLDER/usr/local/bin" "$BINARY"
strip --strip-debug "$FOLDER/usr/local/bin/$(basename "$BINARY")"
