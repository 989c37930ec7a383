#!/usr/bin/env bash
# Sourced by what no quick suite can run. record SCRIPT WHAT: SCRIPT has passed, which its line in tests/LAST_PASS.md tells.
tested=$(git rev-parse --short=10 HEAD)
git diff --quiet HEAD || tested="$tested with changes"
record() {
    sed -i "s#^| \`$1\` .*#| \`$1\` | $(date -u +%F) | $tested | $SECONDS s | $2 |#" tests/LAST_PASS.md
    grep -F "| \`$1\` " tests/LAST_PASS.md
}
