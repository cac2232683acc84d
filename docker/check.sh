#!/usr/bin/env bash
# Looks through what describes how Shoal is run: compose files, the systemd unit, Kubernetes' manifests. Each
# check that cannot be made here says why.
#
#   docker/check.sh [PYTHON]     PYTHON has kubernetes-validate and PyYAML
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
readonly PYTHON=${1:-python3}

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

if docker compose version >/dev/null 2>&1; then check_compose docker compose; else skip "there is no docker compose"; fi
if command -v docker-compose >/dev/null; then check_compose docker-compose; else skip "there is no docker-compose"; fi
if command -v systemd-analyze >/dev/null; then check_unit; else skip "there is no systemd-analyze"; fi
if "$PYTHON" -c 'import kubernetes_validate' 2>/dev/null; then
    check_manifests
else
    skip "$PYTHON has no kubernetes-validate"
fi
