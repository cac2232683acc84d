#!/usr/bin/env bash
# Tests the image and compose.yaml: a first peer, four joiners and Prometheus train on a network of their own.
# Meanwhile one joiner is killed with -9, one is stopped, and one loses its network for a while. The resulting model
# is bit-identical to the model that a single process trains.
#
#   docker/try.sh [SHOAL]    skips, with the reason, where there is no docker
#
# Tests the image that SHOAL_IMAGE names, or else one that it builds around SHOAL (target/release/shoal).
set -euo pipefail

SHOAL=$(realpath --canonicalize-missing "${1:-$(dirname "${BASH_SOURCE[0]}")/../target/release/shoal}")
readonly SHOAL
cd "$(dirname "${BASH_SOURCE[0]}")"
readonly PROJECT=shoal-try-$$
readonly JOINERS=4
# The seconds that any wait may take.
readonly PATIENCE=300

say() { printf '%s\n' "$*" >&2; }
skip() { say "skipped: $*"; exit 0; }
fail() { say "failed: $*"; compose logs --tail 20 >&2 || true; exit 1; }

find_compose() {
    if docker compose version >/dev/null 2>&1; then
        COMPOSE=(docker compose)
    elif command -v docker-compose >/dev/null; then
        COMPOSE=(docker-compose)
    else
        skip "neither docker compose nor docker-compose is installed"
    fi
}

compose() {
    "${COMPOSE[@]}" --project-name "$PROJECT" -f compose.yaml -f compose.try.yaml "$@"
}

clean_up() {
    compose down --volumes --timeout 1 >/dev/null 2>&1 || true
}

prepare_images() {
    if [[ -z ${SHOAL_IMAGE:-} ]]; then
        [[ -x $SHOAL ]] || skip "there is no $SHOAL: make build"
        docker image inspect debian:bookworm-slim >/dev/null 2>&1 || docker pull debian:bookworm-slim \
            || skip "debian:bookworm-slim is not here and cannot be pulled"
        export SHOAL_IMAGE=shoal:try
        ./build-from-host.sh "$SHOAL_IMAGE" "$SHOAL"
    fi
    local image=prom/prometheus:v3.5.0
    docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" 2>/dev/null || {
        say "$image cannot be pulled: Debian's Prometheus is used"
        image=shoal-try-prometheus
        docker build --quiet --tag "$image" - <try/prometheus.Dockerfile
    }
    # Any free port: the script asks Prometheus at its own address.
    export PROMETHEUS_IMAGE=$image PROMETHEUS_PORT=0
}

# wait_for WHAT COMMAND...: waits until the command succeeds.
wait_for() {
    local what=$1 end=$((SECONDS + PATIENCE))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || fail "$what did not come within $PATIENCE s"
        sleep 0.3
    done
    say "$what"
}

# The number of events of a kind that the first peer has written.
events() { docker exec "$first" grep --count "\"event\":\"$1\"" /data/events || true; }
has_events() { (($(events "$1") >= $2)); }
# Records the counts before an action.
note_events() { lost=$(events lost) admitted=$(events admitted); }
is_running() { [[ $(docker inspect --format '{{.State.Running}}' "$1") == true ]]; }
has_ended() { ! is_running "$1"; }
exit_code() { docker inspect --format '{{.State.ExitCode}}' "$1"; }

address() { docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1"; }

# The first value of Prometheus's answer to a query.
ask() {
    curl --silent --get --data-urlencode "query=$1" "http://$(address "$prometheus"):9090/api/v1/query" \
        | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"]["result"][0]["value"][1])'
}
answers() { [[ $(ask "$1") == "$2" ]]; }

start() {
    compose up --detach --scale joiner="$JOINERS" configuration first joiner prometheus >/dev/null
    first=$(compose ps -q first)
    prometheus=$(compose ps -q prometheus)
    mapfile -t joiners < <(compose ps -q joiner)
    ((${#joiners[@]} == JOINERS)) || fail "there are ${#joiners[@]} joiners"
    network=$(docker inspect --format '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}' "$first")
    wait_for "five peers train" has_events committed 3
    wait_for "Prometheus found all of them by their names" answers 'count(up{job="shoal"} == 1)' $((JOINERS + 1))
}

kill_one() {
    note_events
    # The process dies by itself: docker's own kill would keep the container down.
    docker exec "${joiners[0]}" sh -c 'kill -9 -1' || true
    wait_for "a joiner was killed with -9 and is lost" has_events lost $((lost + 1))
    wait_for "docker started it again, and it is a member" has_events admitted $((admitted + 1))
}

stop_one() {
    docker stop --time 30 "${joiners[1]}" >/dev/null
    has_ended "${joiners[1]}" || fail "a joiner that was stopped runs"
    [[ $(exit_code "${joiners[1]}") == 0 ]] || fail "it left with $(exit_code "${joiners[1]}")"
    wait_for "Prometheus counts one less" answers 'max(shoal_members)' "$JOINERS"
    say "a joiner was stopped, and left with exit code 0"
}

cut_off_one() {
    note_events
    docker network disconnect "$network" "${joiners[2]}"
    wait_for "a joiner was cut off and is lost" has_events lost $((lost + 1))
    docker network connect "$network" "${joiners[2]}"
    wait_for "its network is back, and it is a member" has_events admitted $((admitted + 1))
    is_running "${joiners[2]}" || fail "it ended"
}

compare() {
    if has_ended "$first"; then fail "the run ended too soon to have tried everything"; fi
    wait_for "the run is over" has_ended "$first"
    local joiner
    for joiner in "$first" "${joiners[@]}"; do
        wait_for "a peer ended" has_ended "$joiner"
        [[ $(exit_code "$joiner") == 0 ]] || fail "a peer left with $(exit_code "$joiner")"
    done
    local swarm alone
    swarm=$(with_first shoal checkpoint hash /data/out/checkpoint)
    alone=$(with_first sh -c 'cd /tmp
        shoal local /meeting/run.toml --out alone --threads 1 >said 2>&1 || { cat said >&2; exit 1; }
        shoal checkpoint hash alone/checkpoint')
    say "the swarm's model      $swarm"
    say "one process's model    $alone"
    [[ -n $swarm && $swarm == "$alone" ]] || fail "they differ"
}

with_first() {
    docker run --rm --volumes-from "$first" --entrypoint "" "$SHOAL_IMAGE" "$@"
}

main() {
    command -v docker >/dev/null || skip "docker is not installed"
    docker info >/dev/null 2>&1 || skip "the docker engine does not run, or rejects this user"
    find_compose
    prepare_images
    trap clean_up EXIT
    start
    kill_one
    stop_one
    cut_off_one
    compare
}

main "$@"
