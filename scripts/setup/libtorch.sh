# shellcheck shell=bash
# .libtorch, the folder that .cargo/config.toml names: include, lib and build-version, as
# torch-sys wants them. They point into a PyTorch that is installed, or into .libtorch/site.

libtorch_is_ready() {
    [[ $(cat .libtorch/build-version 2>/dev/null) == "$TORCH_VERSION" ]] \
        && [[ -e .libtorch/lib/libtorch.so && -e .libtorch/lib/libtorch_cpu.so ]] \
        && [[ -e .libtorch/lib/libc10.so && -e .libtorch/include/torch/headeronly/version.h ]]
}

install_libtorch() {
    libtorch_is_ready && return
    local new=.libtorch.new python torch
    rm -rf "$new"
    mkdir "$new"
    for python in "$PYTHON" .venv/bin/python python3 python; do
        torch=$(torch_folder "$python") || continue
        link_libtorch "$new" "$torch"
        libtorch_works "$new" || continue
        finish_libtorch "$new" "$torch"
        return
    done
    if nvidia-smi -L >/dev/null 2>&1; then
        say "an NVIDIA GPU is here: libtorch will be the one of a whole PyTorch"
        install_test_python
        torch=$(torch_folder .venv/bin/python)
    else
        download_libtorch "$new"
        torch=site/torch
    fi
    link_libtorch "$new" "$torch"
    libtorch_works "$new" || fail "the libtorch from pip does not load: $(cat "$new/check.log")"
    finish_libtorch "$new" "$torch"
}

# PyTorch's wheel on PyPI is built for CUDA; its CPU library needs two small CUDA libraries
# besides, and no GPU. Nothing in it depends on the version of Python.
download_libtorch() {
    local new=$1 tag arguments=()
    say "downloading libtorch $TORCH_VERSION with pip: 543 MB, 0.6 GB on disk"
    need_space 2000 libtorch
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_25 manylinux_2_24 manylinux_2_17; do
        arguments+=(--platform "${tag}_$(uname -m)")
    done
    pip_install "$PYTHON" "$PWD/$new/scratch" --target "$new/wheels" \
        --python-version 3.12 --only-binary=:all: --no-deps "${arguments[@]}" \
        --require-hashes -r scripts/libtorch-requirements.txt
    keep_what_is_used "$new/wheels" "$new/site"
}

# Keeps the headers, the licences, and the libraries that libtorch_cpu.so loads: half of the wheels.
keep_what_is_used() {
    local wheels=$1 site=$2 library relative
    mkdir -p "$site/torch"
    mv "$wheels"/*.dist-info "$site"
    mv "$wheels/torch/include" "$site/torch"
    while read -r library; do
        relative=${library#"$(realpath "$wheels")"/}
        mkdir -p "$(dirname "$site/$relative")"
        cp "$library" "$site/$relative"
    done < <(libraries_inside "$wheels")
    rm -rf "$wheels"
}

libraries_inside() {
    local folder cpu
    folder=$(realpath "$1")
    cpu=$folder/torch/lib/libtorch_cpu.so
    { printf '%s\n' "$cpu" && ldd "$cpu" | awk '$2 == "=>" && $3 ~ "^/" { print $3 }'; } \
        | xargs realpath --no-symlinks | grep -F "$folder/" | sort -u
}

# link_libtorch NEW TORCH, where TORCH is absolute, or relative to .libtorch.
link_libtorch() {
    local new=$1 torch=$2 lib=$2/lib library
    if [[ $torch != /* ]]; then lib=../$lib; fi
    rm -rf "$new/include" "$new/lib"
    mkdir "$new/lib"
    ln -s "$torch/include" "$new/include"
    for library in libtorch_cpu.so libc10.so; do ln -s "$lib/$library" "$new/lib/$library"; done
    # The real libtorch.so asks for the CUDA libraries, which a CPU machine lacks.
    echo 'INPUT(libtorch_cpu.so)' >"$new/lib/libtorch.so"
}

# Builds and runs a program of one call, linked as cargo will do it: headers, libraries, their needs.
libtorch_works() {
    local new=$1 libraries
    libraries=$(dirname "$(realpath "$new/lib/libtorch_cpu.so")")
    c++ -x c++ - -o "$new/check" -I"$new/include" -L"$new/lib" -ltorch -lc10 \
        -Wl,--allow-shlib-undefined -Wl,-rpath,"$libraries" >"$new/check.log" 2>&1 <<'CPP' || return 1
#include <cstdio>
#include <torch/headeronly/version.h>
namespace at { int get_num_threads(); }
int main() {
    std::printf("%d.%d.%d", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, TORCH_VERSION_PATCH);
    return at::get_num_threads() > 0 ? 0 : 1;
}
CPP
    [[ $("$new/check" 2>"$new/check.log") == "$TORCH_VERSION" ]]
}

finish_libtorch() {
    local new=$1 torch=$2
    rm -f "$new/check" "$new/check.log"
    echo "$TORCH_VERSION" >"$new/build-version"
    rm -rf .libtorch
    mv "$new" .libtorch
    say "libtorch $TORCH_VERSION is ready, from ${torch/#site/.libtorch/site}"
}
