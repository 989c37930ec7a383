#!/usr/bin/env bash
# Sourced by what no quick suite can run. record SCRIPT WHAT: SCRIPT has passed, which its line in tests/LAST_PASS.md tells.
record() {
    local commit
    commit=$(git rev-parse --short=10 HEAD)
    git diff --quiet HEAD || commit="$commit with changes"
    sed -i "s#^| \`$1\` .*#| \`$1\` | $(date -u +%F) | $commit | $SECONDS s | $2 |#" tests/LAST_PASS.md
    grep -F "| \`$1\` " tests/LAST_PASS.md
}
