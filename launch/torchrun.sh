#!/usr/bin/env bash
# Trains on all devices of 1..N machines. Every argument goes to `python -m train` untouched:
#   bash launch/torchrun.sh experiment=emoji                     all GPUs of this machine, or two CPU processes
#   NPROC=4 bash launch/torchrun.sh experiment=emoji             four processes
#   NNODES=2 MASTER_ADDR=node-1 bash launch/torchrun.sh …        the same line on each of the two machines
#   bash launch/torchrun.sh --dry-run experiment=emoji           only print the command
# From the environment: NPROC, NNODES, MASTER_ADDR, MASTER_PORT (29500), RDZV_ID (dyad). On SLURM: launch/slurm.sbatch.
# Exit codes as `python -m train`: 0 ok, 2 configuration, 3 damaged data, 4 hardware, 75 preempted: run it again.
set -euo pipefail
# shellcheck disable=SC2086 # several words; never none, or `source` would hand on our own arguments
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ${DYAD_EXTRAS:-demo}
source launch/job.sh

dry_run=
if [ "${1:-}" = --dry-run ]; then
    dry_run=1
    shift
fi

if [ -z "${NPROC:-}" ]; then
    NPROC=$({ nvidia-smi -L || true; } 2>/dev/null | wc -l)
    if [ "$NPROC" -eq 0 ]; then NPROC=2; fi
fi
dyad_numbers NPROC="$NPROC" NNODES="${NNODES:-1}" SLURM_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
if [ "${NNODES:-1}" = 1 ]; then
    rendezvous=(--standalone)
else
    rendezvous=(--nnodes="$NNODES" --rdzv-id="${RDZV_ID:-dyad}"
        --rdzv-endpoint="${MASTER_ADDR:?set MASTER_ADDR to the first machine}:${MASTER_PORT:-29500}")
    if [ -n "${SLURM_NODEID:-}" ]; then # the place of this machine is known: no names to compare, ranks in order
        rendezvous+=(--rdzv-backend=static --node-rank="$SLURM_NODEID")
    else
        rendezvous+=(--rdzv-backend=c10d)
    fi
fi
# A scheduler signals every process of a job. torchrun would die of SIGUSR1, leaving its trainers, and kills them 30 s after
# SIGTERM: it ignores both (see below), handles what nobody sends, and the trainers get the signals' defaults back.
command=(python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$NPROC" --signals-to-handle=SIGQUIT
    --no-python env --default-signal="TERM,USR1" python -m train "$@")

if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

if [ "${SLURM_NODEID:-0}" = 0 ]; then dyad_check "$@" >/dev/null; fi
if [ "${NNODES:-1}" != 1 ] && [ "${SLURM_NODEID:-}" = 0 ]; then dyad_port "${MASTER_PORT:-29500}"; fi
threads=$((${SLURM_CPUS_PER_TASK:-$(nproc)} / NPROC))
: "${OMP_NUM_THREADS:=$((threads > 1 ? threads : 1))}"
DYAD_EXIT_CODE=$(mktemp) # the trainer writes its exit code here, see data/errors.py
export OMP_NUM_THREADS DYAD_EXIT_CODE
trap 'rm -f "$DYAD_EXIT_CODE"' EXIT
trap '' TERM INT HUP USR1 # inherited
"${command[@]}" &
agent=$!

# shellcheck disable=SC2329 # by the trap
stop() { # asks the trainers; torchrun has nothing to lose while it has none
    asked=75
    local trainers
    trainers=$({ pgrep -P "$agent" || cat "/proc/$agent/task/$agent/children"; } 2>/dev/null) || true
    # shellcheck disable=SC2086 # several process ids
    kill ${trainers:--KILL "$agent"} 2>/dev/null || true
}
trap stop TERM INT HUP USR1
asked=
dyad_attend "$agent" && status=0 || status=$?
if [ "$status" != 0 ] && [ -n "$asked" ]; then status=$asked; fi # stopped before there was anything to save
exit "$(grep . "$DYAD_EXIT_CODE" || echo "$status")"
