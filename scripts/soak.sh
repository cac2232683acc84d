#!/usr/bin/env bash
# Looks for what no test has found yet, for as long as it is let: faulty swarms in the simulator, and
# demos in which peers are killed. Seeds that were tried and what they came to go to stdout; a failing
# one ends it, with the command that shows it again.
#
#   scripts/soak.sh SECONDS [TEXT]     TEXT is trained on in the demos; the built-in text else
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:?how many seconds}
SECONDS=0 # the shell's own clock, which the environment may have set
text=${2:+$(realpath "$2")}
batch=3000

cargo build --quiet --release -p shoal-node
cargo test --quiet -p shoal-scheduler --no-run
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Never the seeds of another day.
first=$((($(date +%s) % 1000000) * 1000))
seeds=0 demos=0
while ((SECONDS < seconds)); do
    range="$((first + seeds))..$((first + seeds + batch))"
    SHOAL_SIM_SEED=$range cargo test --quiet -p shoal-scheduler faulty_swarms >"$folder/sim.log" 2>&1 || {
        grep -A 10 'failed:$' "$folder/sim.log" | grep -v '^ *[0-9]*: \| at '
        exit 1
    }
    seeds=$((seeds + batch))
    ((SECONDS < seconds)) || break
    seed=$((first + demos))
    # In every other one the peer that keeps the run is killed too.
    anchors=$((demos % 2 * 2 + 1))
    demo=(target/release/shoal demo --peers 6 --stages 3 --steps 30 --kill-every 2 --seed "$seed"
        --anchors "$anchors"
        ${text:+--data "$text"} --out "$folder/demo")
    "${demo[@]}" >"$folder/demo.log" 2>&1 || {
        tail -n 3 "$folder/demo.log"
        echo "again: ${demo[*]}"
        exit 1
    }
    demos=$((demos + 1))
    echo "after $SECONDS s: $seeds faulty swarms simulated, $demos demos; the last:" \
        "$(grep '^killed' "$folder/demo.log" || echo 'nobody was killed')"
done
echo "$seeds faulty swarms simulated and $demos demos in $SECONDS s: nothing found"
