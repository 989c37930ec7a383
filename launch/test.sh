#!/usr/bin/env bash
# The whole test suite, after ruff and pyright, one process per core (TEST_PROCESSES).
#   bash launch/test.sh --coverage        also measures line coverage, which must be 90 % at least; a third slower
#   bash launch/test.sh --soak            also what takes minutes: many kills, long runs, four processes
#   bash launch/test.sh --lowest          the quick tests of data, train and eval on the oldest packages of pyproject.toml
#   bash launch/test.sh --cluster         a SLURM cluster and the Dockerfile instead: root, Debian 12, 25 GB, half an hour
#   bash launch/test.sh --soak -k kills   any other arguments go to pytest, which then runs alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh demo dev bench build onnx
export HF_HUB_OFFLINE=1 WANDB_MODE=offline COVERAGE_FILE="$PWD/.coverage"
processes=${TEST_PROCESSES:-$(nproc)}
export OMP_NUM_THREADS=1 # threads of several processes would wait for each other; nproc would believe it
ruff check --no-cache .
ruff format --check .
pyright
if [ "$*" = --lowest ]; then exec bash launch/lowest.sh; fi
if [ "$*" = --cluster ]; then
    bash tests/cluster/run.sh
    exec bash tests/docker/run.sh
fi
soak=() measured=()
if [ "$*" = --coverage ]; then
    measured=(coverage run -m)
    shift
fi
if [ "$*" = --soak ]; then
    soak=(--soak)
    shift
fi
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi
rm -f .coverage .coverage.*
python -m "${measured[@]}" pytest "${soak[@]}" -n "$processes" --dist loadfile --no-loadscope-reorder
if [ "${#measured[@]}" = 0 ]; then exit; fi
python -m coverage combine -q
python -m coverage report --fail-under=90
