#!/usr/bin/env bash
# The whole test suite, after ruff and beside pyright, one process per core and one more (TEST_PROCESSES).
#   bash launch/test.sh --fast            what a commit wants, in three minutes: tests of changed folders, and the quickest
#   bash launch/test.sh --durations       also writes tests/durations.md, by which files are ordered and --fast chooses
#   bash launch/test.sh --coverage        also measures line coverage, which must be 90 % at least; a third slower
#   bash launch/test.sh --soak            also what takes minutes: many kills, long runs, four processes
#   bash launch/test.sh --lowest          the quick tests of data, train and eval on the oldest packages of pyproject.toml
#   bash launch/test.sh --cluster         a SLURM cluster and the Dockerfile instead: root, Debian 12, 25 GB, half an hour
#   bash launch/test.sh --messages PATH   adds to tests/messages.txt what the tests of PATH met: read the change
#   bash launch/test.sh --soak -k kills   any other arguments go to pytest, which then runs alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh demo dev bench build onnx
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled COVERAGE_FILE="$PWD/.coverage"
processes=${TEST_PROCESSES:-$(($(nproc) + 1))} # one more than cores: many tests wait for timeouts and other processes
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile our modules, each for itself
export OMP_NUM_THREADS=1 # threads of several processes would wait for each other; nproc would believe it
export OMP_WAIT_POLICY=passive # … and where a test has two, they would spin: 74 s instead of 4 beside other processes
ruff check --no-cache .
ruff format --check .
types=$(mktemp) met=$(mktemp)
trap 'rm -f "$types" "$met"' EXIT
pyright >"$types" 2>&1 & # the first minute has a core to spare: pytest collects
checker=$!
typed() { # what pyright found; a type error is a failure
    wait "$checker" || { cat "$types" && exit 1; }
    tail -n 1 "$types"
}
spread=(-n "$processes" --dist loadfile --no-loadscope-reorder) measured=()
case ${1:-} in
'') set -- "${spread[@]}" ;;
--fast)
    mapfile -t files < <(PYTHONPATH=tests python -m helpers.durations)
    set -- "${spread[@]}" "${files[@]}"
    ;;
--durations) set -- "${spread[@]}" --durations-table ;;
--soak) [ $# -gt 1 ] || set -- "${spread[@]}" --soak ;;
--coverage)
    rm -f .coverage .coverage.*
    measured=(coverage run -m)
    set -- "${spread[@]}"
    ;;
--messages)
    shift
    typed
    DYAD_MESSAGES_MET=$met python -m pytest "${spread[@]}" "$@"
    PYTHONPATH=tests python -m helpers.messages "$met"
    python -m docs.write_reference # which shows the messages
    exit
    ;;
--lowest) typed && exec bash launch/lowest.sh ;;
--cluster) typed && bash tests/cluster/run.sh && exec bash tests/docker/run.sh ;;
esac
python -m "${measured[@]}" pytest "$@"
typed
if [ "${#measured[@]}" = 0 ]; then exit; fi
python -m coverage combine -q
python -m coverage report --fail-under=90
