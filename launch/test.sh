#!/usr/bin/env bash
# The whole test suite with line coverage, after ruff, pyright and shellcheck, one process per core (TEST_PROCESSES).
# Arguments go to pytest, which then runs alone:  bash launch/test.sh -k order
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo dev bench build onnx
export HF_HUB_OFFLINE=1 WANDB_MODE=offline COVERAGE_FILE="$PWD/.coverage"
processes=${TEST_PROCESSES:-$(nproc)}
export OMP_NUM_THREADS=1 # threads of several processes would wait for each other; nproc would believe it
ruff check --no-cache .
ruff format --check .
shellcheck -x launch/*.{sh,sbatch} tests/{,*/}*.sh .ci/run
pyright
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi
rm -f .coverage .coverage.*
python -m coverage run -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder
python -m coverage combine -q
python -m coverage report --fail-under=90
