#!/usr/bin/env bash
# Trains on all devices of 1..N machines. Every argument goes to `python -m train` untouched:
#   bash launch/torchrun.sh experiment=emoji                     all GPUs of this machine, or two CPU processes
#   NPROC=4 bash launch/torchrun.sh experiment=emoji             four processes
#   NNODES=2 MASTER_ADDR=node-1 bash launch/torchrun.sh …        the same line on each of the two machines
#   bash launch/torchrun.sh --dry-run experiment=emoji           only print the command
# From the environment: NPROC, NNODES, MASTER_ADDR, MASTER_PORT (29500), RDZV_ID (dyad).
# Exit codes as `python -m train`: 0 ok, 2 configuration, 3 damaged data, 4 hardware, 75 preempted: run it again.
set -euo pipefail
# shellcheck disable=SC2086 # several words; never none, or `source` would hand on our own arguments
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ${DYAD_EXTRAS:-demo}

dry_run=
if [ "${1:-}" = --dry-run ]; then
    dry_run=1
    shift
fi

if [ -z "${NPROC:-}" ]; then
    NPROC=$(nvidia-smi -L 2>/dev/null | wc -l)
    if [ "$NPROC" -eq 0 ]; then NPROC=2; fi
fi
if [ "${NNODES:-1}" = 1 ]; then
    rendezvous=(--standalone)
else
    rendezvous=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-dyad}"
        --rdzv-endpoint="${MASTER_ADDR:?set MASTER_ADDR to the first machine}:${MASTER_PORT:-29500}")
fi
command=(python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$NPROC" -m train "$@")

if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

# a mistake is told once and at once, not by every process
WORLD_SIZE=$((NPROC * ${NNODES:-1})) python -c 'import sys
from data.errors import run
from train.__main__ import check_arguments
run(lambda: check_arguments(sys.argv[1:]))' "$@"
: "${OMP_NUM_THREADS:=$(($(nproc) > NPROC ? $(nproc) / NPROC : 1))}"
DYAD_EXIT_CODE=$(mktemp) # the trainer writes its exit code here, see data/errors.py
export OMP_NUM_THREADS DYAD_EXIT_CODE
trap 'rm -f "$DYAD_EXIT_CODE"' EXIT
"${command[@]}" &
agent=$!

# shellcheck disable=SC2329 # by the trap
stop() { # asks the trainers, not torchrun, which would kill them after 30 s; torchrun while it has none
    asked=75
    # shellcheck disable=SC2046 # several process ids
    kill $({ pgrep -P "$agent" || cat "/proc/$agent/task/$agent/children"; } 2>/dev/null || echo "$agent") || true
}
trap stop TERM INT HUP USR1
status=0
asked=
while true; do # a trapped signal ends `wait` early, not the child
    wait "$agent" && status=0 || status=$?
    kill -0 "$agent" 2>/dev/null || break
done
if [ "$status" != 0 ] && [ -n "$asked" ]; then status=$asked; fi # stopped before there was anything to save
exit "$(grep . "$DYAD_EXIT_CODE" || echo "$status")"
