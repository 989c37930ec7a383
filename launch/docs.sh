#!/usr/bin/env bash
# Writes the pages of docs/reference/ from the code, and builds the site with MkDocs, in an environment of its own (.docs):
#   bash launch/docs.sh          into site/; a warning is an error. Open site/index.html
#   bash launch/docs.sh serve    a local server that builds again when a page changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh demo
python -m docs.write_reference
stamp=$(cksum <docs/requirements.txt)
if [ "$(cat .docs/.stamp 2>/dev/null)" != "$stamp" ]; then
    rm -rf .docs
    python -m venv .docs
    .docs/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r docs/requirements.txt
    echo "$stamp" >.docs/.stamp
fi
export NO_MKDOCS_2_WARNING=1 # mkdocs 1.6 is pinned
if [ "${1:-build}" = serve ]; then exec .docs/bin/mkdocs serve; fi
exec .docs/bin/mkdocs build --strict --quiet
