#!/usr/bin/env bash
# Trains on all devices of 1..N machines. Every argument goes to `python -m train` untouched:
#   bash launch/torchrun.sh experiment=emoji                     all GPUs of this machine, or two CPU processes
#   NPROC=4 bash launch/torchrun.sh experiment=emoji             four processes
#   NNODES=2 MASTER_ADDR=node-1 bash launch/torchrun.sh …        the same line on each of the two machines
#   bash launch/torchrun.sh --dry-run experiment=emoji           only print the command
# From the environment: NPROC, NNODES, MASTER_ADDR, MASTER_PORT (29500), RDZV_ID (dyad). On SLURM: launch/slurm.sbatch.
# Exit codes as `python -m train`: 0 ok, 2 configuration, 3 damaged data, 4 hardware, 75 preempted: run it again.
# After 4, such as a killed process, it goes on by itself from the newest checkpoint, dist.restarts times at most, each time
# only with a new one. Of several machines it does not: slurm.sbatch does, as all of them must begin together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
agent='' asked=''

trainers() { # the children of torchrun's agent that run in sessions of their own; one that has ended is a zombie
    { cat /proc/[0-9]*/stat || true; } 2>/dev/null | awk -v agent="$agent" '$4 == agent && $6 == $1 && $3 != "Z" { print $1 }'
}

# shellcheck disable=SC2329 # by the trap
stop() { # asks the trainers to save; whatever prepares their start has nothing to lose
    asked=75
    if [ -z "$agent" ]; then exit "$asked"; fi
    trap '' TERM INT HUP USR1 # a second signal would kill what runs in $(…), and with it this script
    local running
    running=$(trainers)
    if [ -n "$running" ]; then
        # shellcheck disable=SC2086 # several process ids
        kill $running || true
    else
        kill -KILL -- "-$agent" && wait "$agent" || true
    fi 2>/dev/null
    trap stop TERM INT HUP USR1
}
trap stop TERM INT HUP USR1

train() { # prepares, and becomes torchrun's agent
    # shellcheck disable=SC2086 # several words; never none, or `source` would hand on our own arguments
    source launch/setup.sh ${DYAD_EXTRAS:-demo}
    local dry_run arguments rendezvous seconds numa command threads
    dyad_dry_run "$@"
    set -- "${arguments[@]}"

    if [ -z "${NPROC:-}" ]; then
        NPROC=$(dyad_gpus)
        if [ "$NPROC" -eq 0 ]; then NPROC=2; fi
    fi
    dyad_numbers SLURM_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
    dyad_from_1 NPROC="$NPROC" NNODES="${NNODES:-1}" MASTER_PORT="${MASTER_PORT:-29500}"
    if [ "${NNODES:-1}" = 1 ]; then
        rendezvous=(--standalone)
    else
        if [ -z "${MASTER_ADDR:-}" ]; then
            echo "error: NNODES=$NNODES: set MASTER_ADDR to the name of the first machine, on each machine" >&2
            exit 2
        fi
        seconds=$(dyad_start_timeout "$@")
        rendezvous=(--nnodes="$NNODES" --rdzv-id="${RDZV_ID:-dyad}" --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}"
            --rdzv-conf="join_timeout=$seconds,read_timeout=$seconds,timeout=$seconds")
        if [ -n "${SLURM_NODEID:-}" ]; then # the place of this machine is known: no names to compare, ranks in order
            rendezvous+=(--rdzv-backend=static --node-rank="$SLURM_NODEID")
        else
            rendezvous+=(--rdzv-backend=c10d)
        fi
    fi
    numa=$(dyad_numa /sys/devices/system/node/node1)
    command=(python -m train.distributed.agent "${rendezvous[@]}" --nproc-per-node="$NPROC" --signals-to-handle=SIGQUIT
        ${numa:+"$numa"} --no-python python -m train "$@")
    if [ -n "$dry_run" ]; then
        printf '%q ' "${command[@]}"
        echo
        exit
    fi

    if [ "${SLURM_NODEID:-0}" = 0 ]; then
        dyad_check "$@" >"$notes/folder"
        dyad_state "$(cat "$notes/folder")" >"$notes/before"
    fi
    if [ "${NNODES:-1}" != 1 ] && [ "${SLURM_NODEID:-}" = 0 ]; then dyad_port "${MASTER_PORT:-29500}"; fi
    threads=$((${SLURM_CPUS_PER_TASK:-$(nproc)} / NPROC))
    : "${OMP_NUM_THREADS:=$((threads > 1 ? threads : 1))}"
    DYAD_CORES=$(env -u OMP_NUM_THREADS nproc) # of all processes; each may be bound to those beside its GPU
    export OMP_NUM_THREADS DYAD_CORES DYAD_AGENT=$BASHPID # see data/base/child_processes.py
    export PYTHONSAFEPATH=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # modules come from here, whatever folder is entered
    kill -0 $$ 2>/dev/null || exit # this script was killed meanwhile
    # A scheduler signals every process of a job. torchrun would die of SIGUSR1, and kills its trainers 30 s after SIGTERM:
    # it never gets either, see stop. Trainers hear signals as soon as they can answer, see train/distributed/signals.py.
    exec env --block-signal=TERM,INT,HUP,USR1 setpriv --pdeathsig KILL "${command[@]}"
}

watch() { # when the trainers have left with a code, torchrun may wait for ever for machines that are out of reach
    trap '' TERM INT HUP USR1
    local seconds=0
    while kill -0 "$agent"; do
        sleep 1
        if [ -s "$DYAD_EXIT_CODE" ] && [ -z "$(trainers)" ]; then seconds=$((seconds + 1)); fi
        if [ "$seconds" = 3 ]; then kill -KILL "$agent"; fi
    done
}

start() { # a start of the training, with its exit code in `status`
    : >"$DYAD_EXIT_CODE"
    set -m # a process group of its own, for stop
    train "$@" &
    agent=$!
    set +m
    watch 2>/dev/null &
    dyad_attend "$agent" && status=0 || status=$?
    agent=''
    if [ "$status" != 0 ] && [ -n "$asked" ]; then status=$asked; fi # stopped before there was anything to save
    if [ "$status" -gt 128 ] && [ ! -s "$DYAD_EXIT_CODE" ]; then
        echo "error: torchrun was killed by SIG$(kill -l "$status"), and its trainers with it. Did memory run out?" >&2
        status=4
    fi
    status=$(grep . "$DYAD_EXIT_CODE" || echo "$status")
}

goes_on() { # after a hardware failure, unless we were asked to stop
    [ "$status$asked" = 4 ] && [ "${NNODES:-1}" = 1 ] \
        && PATH="$PWD/.venv/bin:$PATH" dyad_restart "$(cat "$notes/folder")" "$(cat "$notes/before")" "${SLURM_JOB_ID:-$HOSTNAME:$$}"
}

source launch/job.sh
notes=$(mktemp -d)
export DYAD_EXIT_CODE=$notes/code # the trainer writes its exit code here, see data/base/errors.py
trap 'rm -rf "$notes"' EXIT
start "$@"
while goes_on; do
    dyad_going_on "$@"
    set -- "${arguments[@]}"
    start "$@"
done
exit "$status"
