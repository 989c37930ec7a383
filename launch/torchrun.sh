#!/usr/bin/env bash
# Trains on all devices of 1..N machines. Every argument goes to `python -m train` untouched:
#   bash launch/torchrun.sh experiment=emoji                     all GPUs of this machine, or two CPU processes
#   NPROC=4 bash launch/torchrun.sh experiment=emoji             four processes
#   NNODES=2 MASTER_ADDR=node-1 bash launch/torchrun.sh …        the same line on each of the two machines
#   bash launch/torchrun.sh --dry-run experiment=emoji           only print the command
# From the environment: NPROC, NNODES, MASTER_ADDR, MASTER_PORT (29500), RDZV_ID (dyad).
# Exit codes as `python -m train`: 0 ok, 2 configuration, 3 damaged data, 4 hardware, 75 preempted: run it again.
set -euo pipefail
read -ra extras <<<"${DYAD_EXTRAS:-}"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "${extras[@]}"

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
command=(python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$NPROC"
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" -m train "$@")

if [ -n "$dry_run" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

python -m train "$@" --cfg job >/dev/null # a mistake is told once, not by every process
: "${OMP_NUM_THREADS:=$(($(nproc) > NPROC ? $(nproc) / NPROC : 1))}"
DYAD_EXIT_CODE=$(mktemp) # torchrun turns every exit code into 1; the trainer writes its own here
export OMP_NUM_THREADS DYAD_EXIT_CODE
trap 'rm -f "$DYAD_EXIT_CODE"' EXIT
"${command[@]}" &
child=$!
trap 'kill -TERM "$child"' TERM
trap 'kill -INT "$child"' INT
trap 'kill -USR1 "$child"' USR1
status=0
while true; do # a trapped signal ends `wait` early, not the child
    wait "$child" && status=0 || status=$?
    kill -0 "$child" 2>/dev/null || break
done
exit "$(cat "$DYAD_EXIT_CODE" | grep . || echo "$status")"
