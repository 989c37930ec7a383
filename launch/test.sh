#!/usr/bin/env bash
# The whole test suite with line coverage, after ruff, pyright and shellcheck. Arguments go to pytest:  bash launch/test.sh -k order
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo dev bench build
export HF_HUB_OFFLINE=1 WANDB_MODE=offline COVERAGE_FILE="$PWD/.coverage"
ruff check --no-cache .
ruff format --check .
shellcheck -x launch/*.sh .ci/run
pyright
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi
rm -f .coverage .coverage.*
python -m coverage run -m pytest
python -m coverage combine -q
python -m coverage report --fail-under=90
