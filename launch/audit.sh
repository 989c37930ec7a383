#!/usr/bin/env bash
# Looks up known vulnerabilities of everything in requirements.hashes:  bash launch/audit.sh
# Exit codes: 0 none known, 1 some, listed; 2 not checked, since no advisory source answered. Arguments go to pip-audit:
#   bash launch/audit.sh --vulnerability-service osv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh demo dev bench build onnx

dyad_audit() { # dyad_audit FILE …: what pip-audit says of FILE, as JSON
    python -m pip_audit --disable-pip --require-hashes --progress-spinner off --format json -r "$@" || true
}

dyad_verdict() { # in words, from JSON on standard input. A package that the source does not know was not checked
    python -c '
import json, sys
try:
    packages = json.load(sys.stdin)["dependencies"]
except ValueError:
    packages = []
known = [p for p in packages if "vulns" in p]
found = [(p, v) for p in known for v in p["vulns"]]
for p, v in found:
    print(p["name"], p["version"] + ":", v["id"], "fixed in", ", ".join(v["fix_versions"]) or "no version yet")
if not known:
    print("not checked: no advisory source answered")
    sys.exit(2)
rest = f", {len(packages) - len(known)} not checked" if len(packages) > len(known) else ""
print(f"{len(known)} packages checked{rest}, {len(found)} known vulnerabilities")
sys.exit(bool(found))'
}

if [ "${BASH_SOURCE[0]}" != "$0" ]; then return; fi
one=$(mktemp)
trap 'rm -f "$one"' EXIT
awk '/^pip==/,!/\\$/' requirements.hashes >"$one"
dyad_audit "$one" "$@" 2>/dev/null | dyad_verdict >/dev/null || { # one package tells whether anybody answers
    [ $? = 1 ] || { dyad_verdict </dev/null; exit; }
}
dyad_audit requirements.hashes "$@" | dyad_verdict
