#!/usr/bin/env bash
# Builds the stand-in for CUDA: build.sh FOLDER. Does nothing where the folder has one that is newer than its source.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
to=${1:?usage: build.sh FOLDER}
torch=$(realpath "${LIBTORCH:-$here/../../../.libtorch}/include")/..

mkdir -p "$to"
# One build at a time: a second waits here, then finds the work done.
exec 9>"$to/lock"
flock 9
stale=$(find "$here" "$here/../../kernels" -name '*.cu' -newer "$to/libtorch_cuda.so" -o -name '*.cpp' -newer "$to/libtorch_cuda.so" -o -name '*.[ch]' -newer "$to/libtorch_cuda.so" 2>/dev/null || echo none)
if [[ -s $to/libtorch_cuda.so && -s $to/libcuda.so.1 && -z $stale ]]; then exit 0; fi

cc -O1 -shared -fPIC -o "$to/libcuda.so.1" "$here/driver.c"
# Its unfinished file has another name, so that a build which was stopped leaves none.
c++ -std=c++20 -O2 -ffp-contract=off -shared -fPIC -Wall -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    -o "$to/unfinished.so" "$here/stand_in.cpp" -L"$torch/lib" -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined
mv "$to/unfinished.so" "$to/libtorch_cuda.so"
