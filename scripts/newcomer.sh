#!/usr/bin/env bash
# Follows a new user from nothing to a fine-tuned model and to a peer that joined from a second machine, with the
# commands of README.md, and prints the times: installs a wheel, fine-tunes a tiny model through a kill and an
# interruption of both machines, and starts a run. Then makes each common mistake, and checks its message. The machines
# are network namespaces with a router between. Every command must be in README.md, and every message in
# docs/reference/troubleshooting.md.
#
#   scripts/newcomer.sh [PROGRAM]     as root; PROGRAM is target/release/shoal unless it is given
#
# SHOAL_OTHER may name a build of another protocol version, which is then tried as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PROGRAM=$(realpath "${1:-target/release/shoal}")
# What the user types; a wheel's once it is installed.
SHOAL=$PROGRAM
readonly PROGRAM NAME=newcomer-$$ PORT=7410
# The seconds that any wait may take.
readonly PATIENCE=90
# In RFC 2544's network for tests.
readonly FIRST=198.18.1.2 SECOND=198.18.2.2
ROOM=$(mktemp --directory)
lacks=()
readonly ROOM

say() { printf '%s\n' "$*"; }
skip() { say "skipped: $*"; exit 0; }
fail() { say "failed: $*" >&2; exit 1; }

clean_up() {
    local machine
    for machine in first router second; do
        ip netns pids "$NAME-$machine" 2>/dev/null | xargs --no-run-if-empty kill -9 2>/dev/null || true
        ip netns delete "$NAME-$machine" 2>/dev/null || true
    done
    wait 2>/dev/null || true
    mountpoint -q "$ROOM/full" 2>/dev/null && umount "$ROOM/full"
    rm -rf "$ROOM"
}

cable() { # MACHINE ITS-NETWORK
    ip link add "$1" netns "$NAME-router" type veth peer name cable netns "$NAME-$1"
    ip -n "$NAME-router" address add "$2.1/24" dev "$1"
    ip -n "$NAME-$1" address add "$2.2/24" dev cable
    ip -n "$NAME-router" link set "$1" up
    ip -n "$NAME-$1" link set cable up
    ip -n "$NAME-$1" route add default via "$2.1"
}

make_machines() {
    local machine
    for machine in first router second; do
        ip netns add "$NAME-$machine" 2>/dev/null || skip "this user cannot make network namespaces"
        ip -n "$NAME-$machine" link set lo up
        mkdir -p "$ROOM/$machine"
    done
    cable first 198.18.1
    cable second 198.18.2
    ip netns exec "$NAME-router" sysctl -qw net.ipv4.ip_forward=1
}

# rules MACHINE: replaces the packet filter of a machine.
rules() {
    ip netns exec "$NAME-$1" nft flush ruleset
    ip netns exec "$NAME-$1" nft -f -
}

in_readme() { grep -qF -- "$1" README.md || fail "README.md lacks: $1"; }

# on MACHINE COMMAND...: runs a command on a machine, with a home directory of its own.
on() {
    local machine=$1
    shift
    (cd "$ROOM/$machine" && exec ip netns exec "$NAME-$machine" env -u XDG_DATA_HOME \
        HOME="$ROOM/$machine" PATH="$(dirname "$SHOAL"):$PATH" "$@")
}

now() { date +%s%3N; }
took() { printf '%6d ms  %s\n' $(($(now) - $1)) "$2"; }

# until_said FILE TEXT: waits for a line of output.
until_said() {
    local end=$((SECONDS + PATIENCE))
    until grep -qE -- "$2" "$1"; do
        ((SECONDS < end)) || { cat "$1" >&2; fail "the output lacks this after $PATIENCE s: $2"; }
        sleep 0.02
    done
}

# Installs a wheel around the program into a new virtual environment, without network.
install_wheel() {
    local begun wheel
    in_readme 'pip install shoal-swarm'
    if [[ ! -x .venv/bin/python ]]; then
        say "skipped: the wheel: there is no .venv, whose torch it would use: scripts/setup.sh --tests"
        return
    fi
    begun=$(now)
    wheel=$(scripts/wheel/build.py "$PROGRAM" --out "$ROOM/wheel")
    took "$begun" "building the wheel, $(($(stat --format %s "$wheel") / 1000000)) MB"
    begun=$(now)
    SHOAL=$(scripts/wheel/try.py "$wheel" --into "$ROOM/installed")
    took "$begun" "pip install, without the download of PyTorch"
    begun=$(now)
    on first shoal --version >/dev/null
    took "$begun" "shoal --version"
}

# A tiny model with a tokenizer and a chat template, and 50 chats.
make_model_and_chats() {
    .venv/bin/python engine/tests/python/families.py make "$ROOM/first" qwen3 >/dev/null 2>&1
    .venv/bin/python - "$ROOM/first/chats.jsonl" <<'PYTHON'
import json, sys
with open(sys.argv[1], "w") as chats:
    for number in range(50):
        word, times = ["fish", "shoal", "whale", "reef"][number % 4], number % 5 + 1
        question, answer = f"Say {word} {times} times.", " ".join([word] * times)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.write(json.dumps({"messages": messages}) + "\n")
PYTHON
}

# Starts the fine-tuning, or goes on with it, with a second machine.
finetune() { # NUMBER
    : >"$ROOM/finetune-$1"
    on first shoal finetune qwen3 chats.jsonl --out run --lora 4 --epochs 16 -- --wait-for 2 --slow-down 5 \
        >"$ROOM/finetune-$1" 2>&1 &
    until_said "$ROOM/finetune-$1" 'shoal join shoal1'
    LINE=$(grep -oE 'shoal join shoal1[^ ]+' "$ROOM/finetune-$1" | head -n 1)
    help_out "$1"
}

# Joins with the printed line, on the second machine.
help_out() { # NUMBER
    : >"$ROOM/help-$1"
    # shellcheck disable=SC2086
    on second $LINE --slow-down 5 >"$ROOM/help-$1" 2>&1 &
    until_said "$ROOM/help-$1" 'joined, hosting'
    until_said "$ROOM/help-$1" 'training step '
}

# send SIGNAL MACHINE...: sends a signal to all processes of machines.
send() {
    local machine signal=$1
    shift
    for machine in "$@"; do ip netns pids "$NAME-$machine" | xargs --no-run-if-empty kill "-$signal"; done
}

# ended MACHINE: waits for the end of all processes of a machine.
ended() {
    local end=$((SECONDS + PATIENCE))
    while [[ -n $(ip netns pids "$NAME-$1") ]]; do
        ((SECONDS < end)) || { tail -n 20 "$ROOM"/finetune-* "$ROOM"/help-* >&2; fail "a process does not end"; }
        sleep 0.1
    done
}

# steps NUMBER: the first and the last step that a process of the fine-tuning saw.
steps() {
    local file=$ROOM/first/run/events/000$1.jsonl
    grep -oE '"event":"committed","step":[0-9]+' "$file" | grep -oE '[0-9]+$' | sed -n '1p;$p' | paste -sd ' '
}

# until_step NUMBER STEP: waits until a process of the fine-tuning has seen a step.
until_step() {
    local end=$((SECONDS + PATIENCE)) last
    until read -r _ last <<<"$(steps "$1")" && ((${last:-0} >= $2)); do
        ((SECONDS < end)) || fail "the fine-tuning does not come to step $2"
        sleep 0.1
    done
}

# Two machines fine-tune a model; one is killed, both are interrupted, both start again.
finetune_as_told() {
    local begun before after
    in_readme 'shoal finetune '
    [[ -x .venv/bin/python ]] || { say "skipped: fine-tuning: there is no .venv that makes a model"; return; }
    make_model_and_chats
    begun=$(now)
    finetune 0
    took "$begun" "shoal finetune: until a second machine trains with it"
    until_step 0 20
    send KILL second
    ended second
    help_out killed
    until_step 0 60
    # Both at once: the first peer is the only anchor, so it saves the run before it leaves.
    send INT second
    send INT first
    ended second
    ended first
    grep -qF 'the same `shoal finetune` goes on with it' "$ROOM/finetune-0" || fail "it does not say how to go on"
    finetune 1
    ended first
    ended second
    took "$begun" "shoal finetune: with a kill, an interruption of both machines, and the rest"
    read -r _ before <<<"$(steps 0)"
    read -r after _ <<<"$(steps 1)"
    say "           interrupted after step $before, went on with step $after"
    ((after + 5 > before)) || fail "more than five steps were lost"
    check_card "$ROOM/finetune-1"
}

# card FILE WORD: the command behind a word of the card.
card() { sed -n "s/^$2 *\(shoal .*\)/\1/p" "$1" | head -n 1; }

# The commands of the card work, and the hash is the one of a single process.
check_card() {
    local hash alone
    sed -n 's/^/           /; /^ *model /,$p' "$1"
    hash=$(sed -n 's/^checkpoint  //p' "$1")
    alone=$(card "$1" ' ')
    # shellcheck disable=SC2086
    on first $alone >"$ROOM/alone" 2>&1 || { cat "$ROOM/alone"; fail "it does not train alone"; }
    [[ -n $hash ]] && grep -qF "\"checkpoint_hash\": \"$hash\"" "$ROOM/first/run/alone/report.json" \
        || fail "one process alone gets another hash than $hash"
    # shellcheck disable=SC2046
    on first $(card "$1" verify) >/dev/null
    # shellcheck disable=SC2046
    on first $(card "$1" export) >/dev/null
    # shellcheck disable=SC2046
    [[ -n $(echo 'Say fish 2 times.' | on first $(card "$1" chat) --tokens 8 2>/dev/null) ]] || fail "chat says nothing"
    say "           one process alone gets the same hash; verify, chat and export work"
}

# The three commands of README.md, as a new user types them.
join_as_told() {
    local begun line
    in_readme 'make build'
    in_readme 'PATH="$PWD/target/release:$PATH"'
    in_readme 'shoal init -o run.toml'
    in_readme 'shoal start run.toml'
    in_readme 'shoal join shoal1'
    begun=$(now)
    on first shoal init -o run.toml >/dev/null 2>&1
    took "$begun" "shoal init -o run.toml"
    # However fast this machine is, the run goes on until all is tried.
    sed -i 's/^steps = .*/steps = 100000/' "$ROOM/first/run.toml"
    : >"$ROOM/start"
    : >"$ROOM/join"
    begun=$(now)
    on first shoal start run.toml >"$ROOM/start" 2>&1 &
    until_said "$ROOM/start" 'shoal join shoal1'
    took "$begun" "shoal start run.toml: until the line to paste is there"
    line=$(grep -oE 'shoal join shoal1[^ ]+' "$ROOM/start" | head -n 1)
    TICKET=${line#shoal join }
    ADDRESS=/ip4/$FIRST/tcp/$PORT/p2p/$(on first shoal id)
    begun=$(now)
    # shellcheck disable=SC2086
    on second $line >"$ROOM/join" 2>&1 &
    until_said "$ROOM/join" 'joined, hosting'
    took "$begun" "shoal join ...: until it is a member"
    until_said "$ROOM/join" 'training step '
    took "$begun" "shoal join ...: until it reports a step"
    until_said "$ROOM/join" 'UDP port is'
    say "           $(grep -oE "this peer's UDP port is.*" "$ROOM/join" | head -n 1)"
    in_readme 'shoal status'
    on second shoal status | sed -n 's/^/           /; 1,3p'
}

# wrong WHAT TEXT COMMAND...: the output on the second machine contains a text that docs/reference/troubleshooting.md has.
wrong() {
    local what=$1 text=$2 begun said
    shift 2
    begun=$(now)
    said=$(on second timeout "$PATIENCE" "$@" 2>&1 || true)
    took "$begun" "$what"
    [[ $said == *"$text"* ]] || { say "$said"; lacks+=("the output about $what lacks: $text"); return; }
    told "$text" <<<"$said"
    grep -qF -- "$text" docs/reference/troubleshooting.md || lacks+=("docs/reference/troubleshooting.md lacks: $text")
}

# told TEXT: prints the line that contains a text; a finding of the doctor with its fix.
told() {
    awk -v text="$1" '
        function show(line) { sub(/^ */, "           ", line); print line }
        found { if (/^ *->/) show($0); exit }
        index($0, text) { if (/^ *->/) show(before); show($0); found = 1 }
        { before = $0 }'
}

join() { wrong "$1" "$2" shoal join --wait 0 --data-dir "$ROOM/second/other" "${@:3}"; }
doctor() { wrong "$1" "$2" shoal doctor --data-dir "$ROOM/second/other" "${@:3}"; }

wrong_addresses() {
    local id nobody=$ADDRESS
    id=$(on second shoal id --data-dir "$ROOM/second/stranger")
    join "the id of another peer" "correct the peer id in the address" "${ADDRESS%/*}/$id"
    nobody=${nobody/tcp\/$PORT/tcp\/7499}
    join "a port where nobody listens" "does not answer as a Shoal peer" "$nobody"
    doctor "the same, to the doctor" "refuses: nobody listens there" "$nobody"
    join "half an address" "is not a peer address" "/ip4/$FIRST/tcp/$PORT"
}

closed_ports() {
    local drop="table inet closed { chain in { type filter hook input priority 0; IT dport $PORT drop; }; }"
    rules first <<<"${drop/IT/udp}"
    join "UDP closed there" "does not answer as a Shoal peer" "$TICKET"
    doctor "the same, to the doctor" "open UDP port $PORT there" "$TICKET"
    rules first <<<"${drop/IT/tcp}"
    doctor "TCP closed there" "open TCP port $PORT there" "$TICKET"
    rules first <<<""
}

own_port() {
    local nat='table ip nat { chain out { type nat hook postrouting priority srcnat; oifname "first" RULE; };
        chain in { type filter hook forward priority 0; iifname "first" ct state new drop; }; }'
    rules second <<<"table inet closed { chain in { type filter hook input priority 0; ct state new drop; }; }"
    doctor "a firewall on this machine" "in this machine's firewall and in its cloud's security group" "$TICKET"
    rules second <<<""
    rules router <<<"${nat/RULE/masquerade}"
    doctor "a router that translates" "and admits only peers that it has sent to" "$TICKET"
    rules router <<<"${nat/RULE/masquerade random,fully-random}"
    : >"$ROOM/first-two"
    on first shoal join "$TICKET" --data-dir "$ROOM/first/two" --listen 0.0.0.0:7411 --address-file "$ROOM/two" \
        --observer >"$ROOM/first-two" 2>&1 &
    until_said "$ROOM/first-two" 'joined, hosting'
    doctor "one that shows each peer another port" "(symmetric NAT)" "$TICKET" "$(cat "$ROOM/two")"
    rules router <<<""
}

this_machine() {
    mkdir "$ROOM/full"
    mount -t tmpfs -o size=4m tmpfs "$ROOM/full"
    wrong "no space" "free some of it" shoal doctor "$TICKET" --data-dir "$ROOM/full"
    wrong "no space, all the same" "or cut the run into more stages" shoal join "$TICKET" --data-dir "$ROOM/full"
    umount "$ROOM/full"
    wrong "no memory" "give it more memory or disk" \
        shoal join "$TICKET" --data-dir "$ROOM/second/other" --memory 1MiB
    doctor_at_another_time
    if [[ -n ${SHOAL_OTHER:-} ]]; then
        wrong "another version" "use the same release on both" \
            "$SHOAL_OTHER" join "$TICKET" --data-dir "$ROOM/second/other"
        wrong "the same, to its doctor" "install the newer release" \
            "$SHOAL_OTHER" doctor "$TICKET" --data-dir "$ROOM/second/other"
    else
        say "skipped: another version: SHOAL_OTHER names none"
    fi
    local libtorch
    libtorch=$(ldd "$PROGRAM" | awk '$1 == "libtorch_cpu.so" { print $3 }')
    wrong "no libtorch" "libtorch_cpu.so: cannot open shared object file" unshare --mount \
        sh -c "mount -t tmpfs tmpfs '$(dirname "$libtorch")' && '$PROGRAM' --version"
}

doctor_at_another_time() {
    cc -shared -fPIC -o "$ROOM/hour_ahead.so" scripts/hour_ahead.c
    wrong "a clock that is an hour ahead" "set this machine's clock: timedatectl set-ntp true" \
        env LD_PRELOAD="$ROOM/hour_ahead.so" shoal doctor "$TICKET" --data-dir "$ROOM/second/other"
}

main() {
    [[ -x $PROGRAM ]] || skip "there is no $PROGRAM: make build"
    command -v nft >/dev/null || skip "nft is not installed"
    trap clean_up EXIT
    make_machines
    local begun
    begun=$(now)
    scripts/setup.sh
    took "$begun" "scripts/setup.sh, once everything is installed"
    install_wheel
    finetune_as_told
    join_as_told
    # The checks below need its port; the first peer stays.
    ip netns pids "$NAME-second" | xargs --no-run-if-empty kill -9
    wrong_addresses
    closed_ports
    own_port
    this_machine
    ((${#lacks[@]} == 0)) || fail "$(printf '%s\n' "${lacks[@]}")"
}

main
