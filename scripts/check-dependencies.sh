#!/usr/bin/env bash
# What deny.toml says about the crates that we depend on. Advisories are looked up where their
# database can be reached; a machine without it still checks the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

checks=(bans licenses sources)
if timeout 120 cargo deny fetch db >/dev/null 2>&1; then
    checks+=(advisories)
else
    echo 'advisories: not checked, their database cannot be reached from here' >&2
fi
cargo deny --workspace check --hide-inclusion-graph "${checks[@]}"
