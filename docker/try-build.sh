#!/usr/bin/env bash
# Builds docker/Dockerfile, the compiling stage included, without a docker daemon and without a registry, and trains with
# three peers as processes in the image: the first peer, a joiner that is killed with -9, and one that stays. The model
# is bit-identical to the one of a single process.
#
#   docker/try-build.sh [PROFILE]    dev (default) or release; skips, with the reason, what this machine cannot do
#
# The two base images come from debootstrap and from the Rust toolchain of this machine. KEEP=1 keeps all of it for the
# next time.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly PROFILE=${1:-dev} PLACE=$PWD/target/image-build SUITE=bookworm
readonly IMAGE=localhost/shoal:try
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
# Storage of its own, which goes with the folder.
export CONTAINERS_STORAGE_CONF=$PLACE/storage.conf

say() { printf '%s\n' "$*" >&2; }
skip() { say "skipped: $*"; exit 0; }
fail() { say "failed: $*"; exit 1; }

clean_up() {
    jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true
    wait
    buildah rm --all >/dev/null 2>&1 || true
    [[ -n ${KEEP:-} ]] || rm -rf "$PLACE"
}

check_tools() {
    local tool
    for tool in buildah debootstrap rustc; do
        command -v "$tool" >/dev/null || skip "$tool is not installed"
    done
    [[ $(id -u) == 0 ]] || skip "debootstrap needs root"
}

prepare_storage() {
    mkdir -p "$PLACE"
    rm -f "$PLACE/container"
    printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/images"\n' "$PLACE" "$PLACE" \
        >"$CONTAINERS_STORAGE_CONF"
}

# has_image NAME
has_image() { buildah inspect --type image "$1" >/dev/null 2>&1; }

# commit_root ROOT NAME [PATH]: an image of a folder, as its name in docker's registry.
commit_root() {
    local container
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$1" / >/dev/null
    # `add` loses the mode of folders that everybody may write.
    buildah run "$container" -- chmod 1777 /tmp /var/tmp
    [[ -z ${3:-} ]] || buildah config --env "PATH=$3" "$container"
    buildah commit --quiet --rm "$container" "docker.io/library/$2" >/dev/null
    say "image $2"
}

# make_root FOLDER PACKAGES: Debian with these packages besides.
make_root() {
    debootstrap --variant=minbase ${2:+--include="$2"} "$SUITE" "$1" >"$PLACE/debootstrap.log" \
        || fail "debootstrap: $(tail -1 "$PLACE/debootstrap.log")"
    rm -rf "$1"/var/cache/apt/archives/*.deb
    # Certificate authorities that this machine trusts besides, such as a proxy's.
    if compgen -G '/usr/local/share/ca-certificates/*.crt' >/dev/null; then
        install -D --target-directory "$1/usr/local/share/ca-certificates" /usr/local/share/ca-certificates/*.crt
        [[ ! -x $1/usr/sbin/update-ca-certificates ]] || chroot "$1" update-ca-certificates >/dev/null
    fi
}

make_bases() {
    local toolchain root=$PLACE/root
    if ! has_image docker.io/library/debian:bookworm-slim; then
        make_root "$root" ""
        commit_root "$root" debian:bookworm-slim
        rm -rf "$root"
    fi
    if ! has_image docker.io/library/rust:1.95-bookworm; then
        toolchain=$(rustc --print sysroot)
        make_root "$root" build-essential,ca-certificates,git
        mkdir -p "$root/usr/local/cargo"
        cp -a "$toolchain"/{bin,lib,libexec} "$root/usr/local/cargo/" 2>/dev/null \
            || cp -a "$toolchain"/{bin,lib} "$root/usr/local/cargo/"
        commit_root "$root" rust:1.95-bookworm /usr/local/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
        rm -rf "$root"
    fi
}

build() {
    local begun=$SECONDS
    buildah bud --network host --format docker --layers=false --pull-never --build-arg PROFILE="$PROFILE" --file docker/Dockerfile \
        --tag "$IMAGE" . >"$PLACE/build.log" 2>&1 || { tail -20 "$PLACE/build.log" >&2; fail "the image does not build"; }
    say "image $IMAGE after $((SECONDS - begun)) s, $(du -sh "$(root_of)" | cut -f1)"
}

# The image as a folder.
root_of() { buildah mount "$(container)"; }
container() { [[ -e $PLACE/container ]] || buildah from --pull-never "$IMAGE" >"$PLACE/container"; cat "$PLACE/container"; }

# in_image FLAGS...: the program in the image, with a folder of this machine. (The image's /data is a volume.)
in_image() { buildah run --user root --volume "$PLACE/peers:/peers" "$(container)" -- shoal "$@"; }

# joiner NAME: the same, which leaves its process id.
joiner() {
    local script='echo $$ >/peers/$1.pid && exec shoal join @/peers/address --data-dir /peers/$1 --listen 127.0.0.1:0'
    buildah run --user root --volume "$PLACE/peers:/peers" "$(container)" -- sh -c "$script" sh "$1"
}

# wait_for WHAT COMMAND...
wait_for() {
    local what=$1 end=$((SECONDS + 120))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || fail "$what did not come"
        sleep 0.3
    done
    say "$what"
}

train() {
    local data=$PLACE/peers first
    rm -rf "$data" && mkdir -p "$data"
    in_image init --out /peers/run.toml >/dev/null
    sed -i 's/^steps = .*/steps = 60/' "$data/run.toml"
    in_image start /peers/run.toml --data-dir /peers/first --listen 127.0.0.1:0 --wait-for 3 --slow-down 50 \
        --address-file /peers/address --out /peers/out --events /peers/events 2>"$data/first.log" &
    first=$!
    wait_for "the first peer listens" test -s "$data/address"
    joiner one 2>"$data/one.log" &
    joiner two 2>"$data/two.log" &
    wait_for "three peers train" grep --quiet '"event":"committed"' "$data/events"
    kill -9 "$(cat "$data/one.pid")"
    wait_for "a joiner was killed with -9 and is lost" grep --quiet '"event":"lost"' "$data/events"
    wait "$first" || fail "the first peer: $(tail -3 "$data/first.log")"
    in_image local /peers/run.toml --out /peers/alone >/dev/null 2>"$data/alone.log"
    local swarm alone
    swarm=$(in_image checkpoint hash /peers/out/checkpoint)
    alone=$(in_image checkpoint hash /peers/alone/checkpoint)
    [[ -n $swarm && $swarm == "$alone" ]] || fail "hashes differ: $swarm and $alone"
    say "the swarm's model is that of one process: ${swarm:0:8}"
}

check_tools
trap clean_up EXIT
prepare_storage
make_bases
build
train
