#!/usr/bin/env bash
# What torchrun.sh and slurm.sbatch share. Sourced, after setup.sh.

dyad_check() { # refuses a mistake at once, and says it once, not in every process; prints the run folder, if there is one
    WORLD_SIZE=$((NPROC * ${NNODES:-1})) python -c 'import sys
from data.errors import run
from train.__main__ import check_arguments
run(lambda: print(check_arguments(sys.argv[1:]) or ""))' "$@"
}

dyad_attend() { # waits for a child, and returns its exit code: a trapped signal ends `wait` early, not the child
    local status
    while true; do
        wait "$1" && status=0 || status=$?
        kill -0 "$1" 2>/dev/null || return "$status"
    done
}

dyad_first_node() { # of a list as SLURM writes it: a07 of a[07-09,12],b3
    sed -E 's/\[([0-9]+)[^]]*\]/\1/g; s/,.*//' <<<"$1"
}

dyad_state() { # "status step time" of a run folder; "none 0 never" where nothing ran yet
    python - "$1" <<'PY'
import json, pathlib, sys
file = pathlib.Path(sys.argv[1], "run_state.json")
state = json.loads(file.read_text()) if file.exists() else {"status": "none", "step": 0, "time": "never"}
print(state["status"], state["step"], state["time"])
PY
}

dyad_requeue() { # is a job to start again? dyad_requeue RESTARTS BEFORE AFTER, states of its run around this start
    local status step step_before _
    read -r _ step_before _ <<<"$2"
    read -r status step _ <<<"$3"
    # stopped on request, by this start, and once it is a restart also further than the start before: no endless circle
    [ "$status" = preempted ] && [ "$2" != "$3" ] && { [ "$1" -eq 0 ] || [ "$step" -gt "$step_before" ]; }
}
