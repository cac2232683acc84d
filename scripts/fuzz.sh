#!/usr/bin/env bash
# Fuzzes every decoder of bytes from a peer or a file, each for so many seconds. What makes one fail
# is kept in fuzz/artifacts/, with the command that shows it again.
#
#   scripts/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../fuzz"

seconds=${1:?how many seconds for each decoder}
rustc +nightly --version >/dev/null 2>&1 || {
    echo 'fuzzing needs a nightly compiler: rustup toolchain install nightly --profile minimal' >&2
    exit 1
}
cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked

cargo +nightly fuzz build
mapfile -t targets < <(cargo +nightly fuzz list)
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target"
    echo "$target: $seconds s"
    # No decoder needs more at once than a few of the largest messages; leaks are looked for as well.
    cargo +nightly fuzz run "$target" "corpus/$target" "seeds/$target" -- -max_total_time="$seconds" \
        -max_len=65536 -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=128 -verbosity=0 \
        -print_final_stats=1 2>"artifacts.log" || {
        tail -n 40 artifacts.log
        exit 1
    }
    grep -E 'number_of_executed_units|peak_rss_mb' artifacts.log | sed 's/^stat::/  /'
done
rm -f artifacts.log
echo "${#targets[@]} decoders fuzzed: nothing found"
