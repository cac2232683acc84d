#!/usr/bin/env bash
# Validates the files of a deployment: compose files, the systemd unit, Kubernetes manifests, Grafana dashboards and
# the labels of the image. Prints the reason of each check that it skips.
#
#   docker/check.sh [PYTHON]     PYTHON has kubernetes-validate and PyYAML
set -euo pipefail

# The path is relative to the caller's folder.
PYTHON=$(command -v "${1:-python3}") && PYTHON=$(realpath --no-symlinks "$PYTHON")
readonly PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")"

skip() { printf 'skipped: %s\n' "$*" >&2; }

check_compose() {
    local compose=("$@")
    SHOAL_ADDRESS=x "${compose[@]}" -f compose.cloud.yaml config >/dev/null
    "${compose[@]}" -f compose.yaml config >/dev/null
    "${compose[@]}" -f compose.yaml -f compose.try.yaml config >/dev/null
    echo "${compose[*]} accepts the compose files"
}

# systemd requires that the program exists, so the check uses the path of another one.
check_unit() {
    local folder said
    folder=$(mktemp --directory)
    sed "s|/usr/local/bin/shoal|$(command -v true)|" systemd/shoal.service >"$folder/shoal.service"
    said=$(systemd-analyze verify --man=no "$folder/shoal.service" 2>&1 | grep -F shoal.service || true)
    rm -r "$folder"
    [[ -z $said ]] || { printf '%s\n' "$said" >&2; return 1; }
    echo "systemd accepts the unit"
}

check_manifests() {
    "$PYTHON" - kubernetes/*.yaml <<'PYTHON'
import sys
import kubernetes_validate, yaml

for path in sys.argv[1:]:
    with open(path) as file:
        for manifest in yaml.safe_load_all(file):
            kubernetes_validate.validate(manifest, "1.30", strict=True)
            print(f"{path}: Kubernetes accepts the {manifest['kind']} {manifest['metadata']['name']}")
PYTHON
}

# The schema has the version of Grafana that compose.yaml starts. npm compares its downloads with the lock file.
check_dashboards() {
    local wanted
    wanted=$(sed -n 's|.*image: grafana/grafana:||p' compose.yaml)
    grep -qF "\"@grafana/schema\": \"$wanted\"" grafana/check/package.json \
        || { echo "grafana/check/package.json names another version than compose.yaml's $wanted" >&2; return 1; }
    node grafana/check/dashboards.mjs grafana/dashboards/*.json
}

# The label of the image names the release.
check_labels() {
    local version
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' ../Cargo.toml | head -n 1)
    grep -qF "org.opencontainers.image.version=\"$version\"" Dockerfile \
        || { echo "the Dockerfile's label of the version is not $version" >&2; return 1; }
    echo "the label of the image names version $version"
}

if docker compose version >/dev/null 2>&1; then check_compose docker compose; else skip "docker compose is not installed"; fi
if command -v docker-compose >/dev/null; then check_compose docker-compose; else skip "docker-compose is not installed"; fi
if command -v systemd-analyze >/dev/null; then check_unit; else skip "systemd-analyze is not installed"; fi
if "$PYTHON" -c 'import kubernetes_validate' 2>/dev/null; then
    check_manifests
else
    skip "${PYTHON:-python} has no kubernetes-validate"
fi
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    skip "Grafana's schema needs node and npm, which are not installed"
elif npm ci --prefix grafana/check --ignore-scripts --no-audit --no-fund --legacy-peer-deps >/dev/null 2>&1; then
    check_dashboards
else
    skip "npm cannot download Grafana's schema"
fi
check_labels
