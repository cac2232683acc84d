# shellcheck shell=bash
# What the machine must bring, and what to type where something is missing.

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# PyTorch has wheels for these platforms.
check_machine() {
    local system machine libc
    system=$(uname -s)
    machine=$(uname -m)
    if [[ $system != Linux || ! $machine =~ ^(x86_64|aarch64)$ ]]; then
        fail "only Linux on x86-64 or 64-bit Arm is supported for now (this is $system on $machine)"
    fi
    if [[ $machine == aarch64 ]] && ! libtorch_is_ready; then
        say "64-bit Arm is untested: no part of Shoal has run on it yet; please report what you find"
    fi
    libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || true)
    if [[ -z $libc ]] || ! at_least "${libc#glibc }" 2.28; then
        fail "libtorch needs glibc 2.28 or newer (found ${libc:-another libc}): use Debian 12, Ubuntu 22.04 or newer"
    fi
}

# Names everything that is missing at once, each with the line that brings it.
check_tools() {
    local missing=0
    need c++ g++ || missing=1
    need cc g++ || missing=1
    need make make || missing=1
    need git git || missing=1
    need flock util-linux || missing=1
    check_rust || missing=1
    check_python || missing=1
    if ((missing)); then exit 1; fi
    if [[ -n ${LIBTORCH:-}${LIBTORCH_USE_PYTORCH:-} ]]; then
        say "LIBTORCH or LIBTORCH_USE_PYTORCH is set: cargo will use that libtorch, not .libtorch"
    fi
}

# need COMMAND PACKAGE
need() {
    command -v "$1" >/dev/null && return
    say "$1 is missing: $(as_root)apt install $2"
    return 1
}

check_rust() {
    local wanted found
    wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    if ! command -v cargo >/dev/null; then
        say "Rust is missing: curl --proto '=https' -sSf https://sh.rustup.rs | sh -s -- -y, then open a new shell"
        return 1
    fi
    found=$(cargo --version | cut -d' ' -f2)
    at_least "$found" "$wanted" && return
    say "Rust $wanted or newer is needed (found $found): rustup update stable"
    return 1
}

install_lint_tools() {
    local tool
    for tool in rustfmt clippy; do
        cargo "${tool/rustfmt/fmt}" --version >/dev/null 2>&1 && continue
        say "adding the toolchain's component $tool"
        rustup component add "$tool" || fail "$tool is missing: rustup component add $tool"
    done
    if ! cargo deny --version >/dev/null 2>&1; then
        say "building cargo-deny $CARGO_DENY_VERSION with cargo install (a minute)"
        # A debug build takes a quarter of the time, and the checks take seconds with it. The target directory of
        # the caller is no place for another program's build.
        env -u CARGO_TARGET_DIR cargo install --locked --quiet --debug cargo-deny --version "$CARGO_DENY_VERSION"
    fi
}

# The prefix that lets this user install packages.
as_root() { if ((EUID != 0)); then printf "sudo "; fi; }

# at_least FOUND WANTED compares version numbers.
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# need_space MEGABYTES WHAT
need_space() {
    local free
    free=$(($(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }') / 1024))
    ((free >= $1)) && return
    fail "$2 needs $1 MB free in $ROOT for a while, there are $free MB: make room there"
}
