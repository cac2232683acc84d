#!/usr/bin/env bash
# Breaks a swarm of real processes in network namespaces as machines, cables and disks break, by a seed, and compares the model
# with that of `shoal local`. Needs root.
#
#   scripts/drill.sh SECONDS [SEED]
#
# Each round starts five peers, all of them anchors (odd seeds) or the first alone, and draws faults until the run is over or half of
# the round's time is: freezes and unplugged cables of 1 to 15 s, one in eight of up to 120 s, changed addresses, kills with a restart
# (at once, on a disk that is read-only for some seconds, or with a clock that is an hour ahead), disks that are full for a while, and a
# flipped bit in an archived checkpoint before a restart. Several may last at once. The first round that finds something ends it:
# another hash than that of `local`, a peer that ends with an error, or a run that is not over in time. The folder of that round stays.
#
# SHOAL names another binary than target/release/shoal, DRILL_STEPS the steps of a run, DRILL_ROUND the seconds of a round.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:?how many seconds}
seed=${2:-$(($(date +%s) % 1000000))}
peers=5      # the first one included
limit=${DRILL_ROUND:-600} # seconds of a round
[[ $(id -u) == 0 ]] || { echo "drill.sh needs root, for network namespaces" >&2; exit 2; }
shoal=${SHOAL:-target/release/shoal}
[[ -x $shoal ]] || cargo build --quiet --release -p shoal-node
shoal=$(realpath "$shoal")

tag=drill$$
bridge=$tag-br
room=$(mktemp -d "${TMPDIR:-/tmp}/shoal-drill-XXXXXX")
declare -A pid ip
enders=() # the processes that end faults which last
found=

clean_network() {
    for peer in $(seq 0 $((peers - 1))); do ip netns delete "$tag-$peer" 2>/dev/null || true; done
    ip netns delete "$bridge" 2>/dev/null || true
}
stop_all() {
    for one in "${enders[@]}"; do kill "$one" 2>/dev/null || true; done
    enders=()
    for peer in "${!pid[@]}"; do kill_peer "$peer" 2>/dev/null; done
    pid=()
}
finish() {
    stop_all
    clean_network
    for disk in "$room"/*/peer-*; do umount -l "$disk" 2>/dev/null || true; done
    if [[ -z $found ]]; then rm -rf "$room"; fi
}
trap finish EXIT

# One namespace with a bridge, one for each machine, and a cable to each.
make_network() {
    ip netns add "$bridge"
    ip -n "$bridge" link add br0 type bridge
    ip -n "$bridge" link set br0 up
    for peer in $(seq 0 $((peers - 1))); do
        local space=$tag-$peer
        ip netns add "$space"
        ip -n "$space" link set lo up
        ip -n "$bridge" link add "c$peer" type veth peer name eth0 netns "$space"
        ip -n "$bridge" link set "c$peer" master br0 up
        ip -n "$space" link set eth0 up
        ip[$peer]=10.77.0.$((10 + peer))
        ip -n "$space" address add "${ip[$peer]}/24" dev eth0
        ip -n "$space" route add default dev eth0
    done
}

log() { echo "$(printf '%4d' $((SECONDS - began)))s $*" >>"$round/drill.log"; }

# Starts a peer, with these variables in its environment.
start_peer() {
    local peer=$1 space=$tag-$1 home=$round/peer-$1 flags=(--threads 1 --device cpu --http none --no-upnp)
    if [[ $peer == 0 ]]; then
        ip netns exec "$space" env "${@:2}" "$shoal" start "$round/run.toml" --data-dir "$home" --out "$round/out" --listen "0.0.0.0:7410" \
            --address-file "$round/address" "${flags[@]}" >>"$round/peer-$peer.log" 2>&1 &
    else
        ip netns exec "$space" env "${@:2}" "$shoal" join "@$round/address" --data-dir "$home" --listen "0.0.0.0:$((7410 + peer))" \
            "${anchor[@]}" "${flags[@]}" >>"$round/peer-$peer.log" 2>&1 &
    fi
    pid[$peer]=$!
}

draw() { echo $((RANDOM % $1)); }

# Seconds that a fault lasts: few at most times, so that the round makes progress.
lasting() { (($(draw 8))) && echo $((1 + $(draw 15))) || echo $((16 + $(draw 105))); }

# Ends a fault by a command after so many seconds, while others begin.
after() {
    { sleep "$1" && "${@:2}" 2>/dev/null || true; } &
    enders+=($!)
}

kill_peer() { kill -KILL "${pid[$1]}" && wait "${pid[$1]}" 2>/dev/null || true; }

flip_bit() {
    python3 - "$1" <<'PY'
import os, sys
path = sys.argv[1]
with open(path, "rb") as file:
    data = bytearray(file.read())
data[len(data) // 2] ^= 1
# A new file: others may share the old one by a hard link.
with open(path + ".new", "wb") as file:
    file.write(data)
os.replace(path + ".new", path)
PY
}

# A peer that starts on a disk that it cannot write to ends with a reason, and not by a mistake of its own.
start_read_only() {
    local peer=$1 home=$round/peer-$1 code=0
    mount -o remount,ro "$home" || return 0
    start_peer "$peer"
    timeout 60 tail --pid="${pid[$peer]}" -f /dev/null || fail "peer $peer does not end on a read-only disk"
    wait "${pid[$peer]}" || code=$?
    ((code == 1 || code == 2 || code == 3)) || fail "peer $peer ended with $code on a read-only disk: $(tail -n 1 "$round/peer-$peer.log")"
    mount -o remount,rw "$home"
}

# Draws one fault. Every one ends by itself.
fault() {
    local peer home time
    peer=$(draw "$peers") time=$(lasting)
    home=$round/peer-$peer
    [[ -n ${pid[$peer]:-} ]] && kill -0 "${pid[$peer]}" 2>/dev/null || return 0
    case $(draw 8) in
    0)
        log "freeze of peer $peer for $time s"
        kill -STOP "${pid[$peer]}"
        after "$time" kill -CONT "${pid[$peer]}"
        ;;
    1)
        log "cable of peer $peer unplugged for $time s"
        ip -n "$bridge" link set "c$peer" down
        after "$time" ip -n "$bridge" link set "c$peer" up
        ;;
    2)
        local new=10.77.0.$((50 + $(draw 200)))
        [[ " ${ip[*]} " == *" $new "* ]] && return 0
        log "address of peer $peer: ${ip[$peer]} becomes $new"
        ip -n "$tag-$peer" address del "${ip[$peer]}/24" dev eth0
        ip -n "$tag-$peer" address add "$new/24" dev eth0
        ip -n "$tag-$peer" route replace default dev eth0
        ip[$peer]=$new
        ;;
    3)
        log "kill of peer $peer"
        kill_peer "$peer"
        sleep "$(draw 4)"
        start_peer "$peer"
        ;;
    4)
        local files
        mapfile -t files < <(find "$round/out" -name '*.safetensors' 2>/dev/null | sort)
        ((${#files[@]} > 0)) || return 0
        local file=${files[$(draw ${#files[@]})]}
        log "kill of peer 0, and a flipped bit in ${file#"$round/"}"
        kill_peer 0
        flip_bit "$file"
        start_peer 0
        ;;
    5)
        [[ -e $home/full ]] && return 0
        log "disk of peer $peer full for $time s"
        cat /dev/zero >"$home/full" 2>/dev/null || true
        after "$time" rm -f "$home/full"
        ;;
    6)
        log "kill of peer $peer, and a start on a read-only disk"
        kill_peer "$peer"
        start_read_only "$peer"
        start_peer "$peer"
        ;;
    7)
        log "kill of peer $peer, whose clock is then an hour ahead"
        kill_peer "$peer"
        start_peer "$peer" LD_PRELOAD="$room/hour_ahead.so"
        ;;
    esac
}

fail() {
    found=yes
    echo "seed $seed: $1; see $round" >&2
    tail -n 20 "$round/drill.log" >&2
    exit 1
}

one_round() {
    round=$room/$seed
    mkdir -p "$round"
    RANDOM=$((seed % 32768))
    anchor=()
    ((seed % 2)) && anchor=(--anchor)
    cp tests/src/tiny.toml "$round/run.toml"
    sed -i "s/^steps = .*/steps = ${DRILL_STEPS:-2000}/; /^.checkpoint/,/^every/ s/^every = .*/every = 50/" "$round/run.toml"
    python3 -c "print('\n'.join(f'{n} sheep and {n * 7 % 1009} goats' for n in range(9000)))" >"$round/text.txt"
    "$shoal" local "$round/run.toml" --out "$round/local" --threads 1 --device cpu >"$round/local.log" 2>&1 ||
        fail "shoal local failed: $(tail -n 1 "$round/local.log")"
    clean_network
    make_network
    began=$SECONDS
    for peer in $(seq 0 $((peers - 1))); do
        mkdir "$round/peer-$peer"
        mount -t tmpfs -o size=128m shoal-drill "$round/peer-$peer"
        start_peer "$peer"
    done
    while [[ ! -e $round/out/checkpoint/shoal.json ]]; do
        ((SECONDS - began < limit)) || fail "not over after $limit s"
        for peer in "${!pid[@]}"; do
            kill -0 "${pid[$peer]}" 2>/dev/null && continue
            [[ -e $round/out/checkpoint/shoal.json ]] && break
            local code=0
            wait "${pid[$peer]}" || code=$?
            if ((code != 0)) && tail -n 3 "$round/peer-$peer.log" | grep -q 'No space left'; then
                log "peer $peer ended with its full disk, and starts again when there is room"
                while [[ -e $round/peer-$peer/full ]]; do sleep 0.5; done
                start_peer "$peer"
                continue
            fi
            ((code == 0)) || fail "peer $peer ended with $code: $(tail -n 1 "$round/peer-$peer.log")"
            # The first peer was away when the run ended, and lacks the model: a supervisor starts the others again.
            log "peer $peer ended with the run, and starts again for the first peer"
            start_peer "$peer"
        done
        # Faults become rare towards the end, so that the round has one.
        if ((SECONDS - began < limit / 2)); then fault; fi
        sleep "$((2 + $(draw 6)))"
    done
    local here there
    here=$("$shoal" checkpoint hash "$round/out/checkpoint")
    there=$("$shoal" checkpoint hash "$round/local/checkpoint")
    [[ $here == "$there" ]] || fail "another model than local: $here, $there"
    stop_all
    for disk in "$round"/peer-*; do umount -l "$disk" 2>/dev/null || true; done
    echo "seed $seed: same model after $((SECONDS - began)) s, $(wc -l <"$round/drill.log" 2>/dev/null || echo 0) faults"
    rm -rf "$round"
}

cc -shared -fPIC -o "$room/hour_ahead.so" scripts/hour_ahead.c
SECONDS=0
rounds=0
while ((SECONDS < seconds)); do
    one_round
    seed=$((seed + 1)) rounds=$((rounds + 1))
done
echo "$rounds rounds in $SECONDS s: nothing found"
