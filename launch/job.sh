#!/usr/bin/env bash
# What torchrun.sh and slurm.sbatch share. Sourced; in a container of a job, one function:  bash launch/job.sh dyad_check …

dyad_numbers() { # NAME=VALUE …: whole numbers, before arithmetic, which would run $(…) inside them, or scontrol sees them
    local pair
    for pair; do
        if [[ ! ${pair#*=} =~ ^[0-9]{1,18}$ ]]; then
            echo "error: $pair is no whole number" >&2
            exit 2
        fi
    done
}

dyad_from_1() { # NAME=VALUE …: numbers of processes and machines, and ports
    local pair
    dyad_numbers "$@"
    for pair; do
        if [ "${pair#*=}" -lt 1 ] || [ "${pair#*=}" -gt 65535 ]; then
            echo "error: $pair is no number from 1 to 65535" >&2
            exit 2
        fi
    done
}

dyad_start_timeout() { # whole seconds that machines wait for each other: dist.start_timeout among the arguments, else 600
    local argument seconds=600
    for argument; do
        if [[ $argument =~ ^dist\.start_timeout=([1-9][0-9]*)(\.|$) ]]; then seconds=${BASH_REMATCH[1]}; fi
    done
    echo "$seconds"
}

dyad_gpus() { # how many GPUs a process can use here: those it is shown; of GPUs cut into slices (MIG) CUDA shows one slice
    local shown
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # the list ends at a number that is none, and SLURM hides by a name
        shown=$(tr -d ' ' <<<"$CUDA_VISIBLE_DEVICES" | tr , '\n' | sed '/^-/,$d; /^NoDevFiles$/d')
    else
        shown=$(nvidia-smi -L 2>/dev/null) || shown=''
    fi
    if [[ $shown == *MIG* ]]; then echo 1; else grep -c . <<<"$shown" || true; fi
}

dyad_check() { # refuses a mistake at once, and says it once, not in every process; prints the run folder, if there is one
    WORLD_SIZE=$((NPROC * ${NNODES:-1})) python -c 'import sys
from dyad.process import run
from dyad.run.checks import check_arguments
run(lambda: print(check_arguments(sys.argv[1:]) or ""))' "$@"
}

dyad_port() { # refuses a port that the first of several machines cannot open: torchrun would tell it on twenty lines
    python -c 'import os, socket, sys
from dyad.data.base.errors import HardwareError
from dyad.process import run
def open_once():
    try:
        socket.create_server(("", int(sys.argv[1]))).close()
    except OSError as error:
        raise HardwareError(f"MASTER_PORT={sys.argv[1]}: {os.strerror(error.errno)}. Choose another port") from error
run(open_once)' "$1"
}

dyad_attend() { # waits for a child, and returns its exit code: a trapped signal ends `wait` early, not the child
    local status
    while true; do
        wait "$1" 2>/dev/null && status=0 || status=$? # it would tell how the child was killed
        kill -0 "$1" 2>/dev/null || return "$status"
    done
}

dyad_numa() { # torchrun's option that keeps a process on the cores beside its GPU: dyad_numa SECOND_NODE, a folder
    local torch
    torch=$(python -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])')
    # older torchruns do not know it; it ends the run without numactl, on a machine of one node or without GPUs, and where
    # the cores beside a GPU are not allowed
    if [ -e "$1" ] && [ "$(dyad_gpus)" -gt 0 ] && command -v numactl >/dev/null \
        && [ "$(env -u OMP_NUM_THREADS nproc)" = "$(getconf _NPROCESSORS_ONLN)" ] && grep -q -e --numa-binding "$torch/distributed/run.py"; then
        echo --numa-binding=node
    fi
}

dyad_first_node() { # of a list as SLURM writes it: a07 of a[07-09,12],b3
    sed -E 's/\[([0-9]+)[^]]*\]/\1/g; s/,.*//' <<<"$1"
}

dyad_state() { # "status step time" of a run folder; "none 0 never" where nothing ran yet, or of a damaged file
    local json='' key
    local -A value=([status]=none [step]=0 [time]=never)
    if [ -r "$1/run_state.json" ]; then json=$(<"$1/run_state.json"); fi
    for key in "${!value[@]}"; do
        if [[ $json =~ \"$key\":\ *\"?([^\",\}[:space:]]+)[\",\}[:space:]] ]]; then value[$key]=${BASH_REMATCH[1]}; fi
    done
    echo "${value[status]} ${value[step]} ${value[time]}"
}

dyad_restart() { # after exit code 4: says why, and succeeds if the run starts again: dyad_restart FOLDER BEFORE JOB
    # without a state of this start nothing was trained
    [ -n "$1" ] && [ "$2" != "$(dyad_state "$1")" ] && dyad_failed "$1" "$3"
}

dyad_failed() { # records a hardware failure: dyad_failed FOLDER JOB [requeued]
    python -c 'import pathlib, sys
from dyad.process import run
from dyad.train.run_folder.restarts import after_failure
run(lambda: sys.exit(not after_failure(pathlib.Path(sys.argv[1]), sys.argv[2], requeued=len(sys.argv) > 3)))' "$@"
}

dyad_dry_run() { # sets `dry_run` to 1 if --dry-run is among the arguments, else to '', and the array `arguments` to the others
    local argument
    dry_run='' arguments=()
    for argument; do
        # shellcheck disable=SC2034 # the script that sources this reads it
        if [ "$argument" = --dry-run ]; then dry_run=1; else arguments+=("$argument"); fi
    done
}

dyad_going_on() { # sets the array `arguments`: those of a start that goes on: it does not begin again
    local argument
    arguments=()
    for argument; do
        if [[ ! $argument =~ ^resume(\.mode)?=never$ ]]; then arguments+=("$argument"); fi
    done
}

dyad_requeue() { # is a job to start again? dyad_requeue CODE RESTARTS BEFORE AFTER: exit code and states of its run around this start
    local status step step_before _
    read -r _ step_before _ <<<"$3"
    read -r status step _ <<<"$4"
    # stopped on request, and once it is a restart also further than the start before: no endless circle
    { [ "$1" = 75 ] || { [ "$status" = preempted ] && [ "$3" != "$4" ]; }; } && { [ "$2" -eq 0 ] || [ "$step" -gt "$step_before" ]; }
}

if [ "$0" = "${BASH_SOURCE[0]}" ]; then
    set -euo pipefail
    "$@"
fi
