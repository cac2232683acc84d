#!/usr/bin/env bash
# Looks through what describes how Shoal is run and watched: compose files, the systemd unit, Kubernetes'
# manifests, Grafana's dashboards, the image's labels. Each check that cannot be made here says why.
#
#   docker/check.sh [PYTHON]     PYTHON has kubernetes-validate and PyYAML
set -euo pipefail

# As the caller's folder has it.
PYTHON=$(command -v "${1:-python3}") && PYTHON=$(realpath --no-symlinks "$PYTHON")
readonly PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")"

skip() { printf 'skipped: %s\n' "$*" >&2; }

check_compose() {
    local compose=("$@")
    SHOAL_ADDRESS=x "${compose[@]}" -f compose.cloud.yaml config >/dev/null
    "${compose[@]}" -f compose.yaml config >/dev/null
    "${compose[@]}" -f compose.yaml -f compose.try.yaml config >/dev/null
    echo "${compose[*]} takes the compose files"
}

# Systemd wants the program to be there, so the unit is looked at with another one's path.
check_unit() {
    local folder said
    folder=$(mktemp --directory)
    sed "s|/usr/local/bin/shoal|$(command -v true)|" systemd/shoal.service >"$folder/shoal.service"
    said=$(systemd-analyze verify --man=no "$folder/shoal.service" 2>&1 | grep -F shoal.service || true)
    rm -r "$folder"
    [[ -z $said ]] || { printf '%s\n' "$said" >&2; return 1; }
    echo "systemd takes the unit"
}

check_manifests() {
    "$PYTHON" - kubernetes/*.yaml <<'PYTHON'
import sys
import kubernetes_validate, yaml

for path in sys.argv[1:]:
    with open(path) as file:
        for manifest in yaml.safe_load_all(file):
            kubernetes_validate.validate(manifest, "1.30", strict=True)
            print(f"{path}: Kubernetes takes the {manifest['kind']} {manifest['metadata']['name']}")
PYTHON
}

# Grafana's schema is of the version that compose.yaml starts; npm compares what it brings with the lock file.
check_dashboards() {
    local wanted
    wanted=$(sed -n 's|.*image: grafana/grafana:||p' compose.yaml)
    grep -qF "\"@grafana/schema\": \"$wanted\"" grafana/check/package.json \
        || { echo "grafana/check/package.json names another version than compose.yaml's $wanted" >&2; return 1; }
    node grafana/check/dashboards.mjs grafana/dashboards/*.json
}

# The image says which release it is.
check_labels() {
    local version
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' ../Cargo.toml | head -n 1)
    grep -qF "org.opencontainers.image.version=\"$version\"" Dockerfile \
        || { echo "the Dockerfile's label of the version is not $version" >&2; return 1; }
    echo "the image's label is of version $version"
}

if docker compose version >/dev/null 2>&1; then check_compose docker compose; else skip "there is no docker compose"; fi
if command -v docker-compose >/dev/null; then check_compose docker-compose; else skip "there is no docker-compose"; fi
if command -v systemd-analyze >/dev/null; then check_unit; else skip "there is no systemd-analyze"; fi
if "$PYTHON" -c 'import kubernetes_validate' 2>/dev/null; then
    check_manifests
else
    skip "${PYTHON:-python} has no kubernetes-validate"
fi
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    skip "there is no node with npm for Grafana's schema"
elif npm ci --prefix grafana/check --ignore-scripts --no-audit --no-fund --legacy-peer-deps >/dev/null 2>&1; then
    check_dashboards
else
    skip "npm cannot bring Grafana's schema"
fi
check_labels
