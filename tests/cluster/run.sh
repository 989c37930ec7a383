#!/usr/bin/env bash
# launch/slurm.sbatch on a real SLURM: two virtual nodes on this machine, real jobs over gloo, one line per check.
#   bash tests/cluster/run.sh      Debian 12 (needs apt and its packages slurm-wlm and munge); minutes on two cores
# Missing packages are unpacked, not installed. All files, SLURM's too, lie in a temporary folder that is removed at the end,
# also after a failure or Ctrl-C; what was started is stopped. KEEP=1 keeps the folder, to look at the logs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source launch/setup.sh demo
source tests/record.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
work=$(mktemp -d)
mkdir "$work/tmp"
export TMPDIR=$work/tmp SLURM_CONF=$work/slurm.conf # from the first moment on: never another cluster
chmod 755 "$work" # munge's socket is for everybody
daemons=() checks=0
trap finish EXIT
trap 'exit 130' INT TERM HUP

# A cluster ------------------------------------------------------------------------------------------------------------

unpack() { # what is missing of SLURM and munge, by the package lists of now
    local apt=(-qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/packages" "$work/root"
    apt-get "${apt[@]}" update
    apt-get "${apt[@]}" install --simulate --no-install-recommends slurm-wlm munge | awk '/^Inst/ { print $2 }' >"$work/missing"
    (cd "$work/packages" && xargs -r apt-get "${apt[@]}" download <"$work/missing")
    for package in "$work"/packages/*.deb; do
        if [ -e "$package" ]; then dpkg-deb -x "$package" "$work/root"; fi
    done
    plugins=$(dirname "$(find "$work/root" /usr/lib -name select_cons_tres.so -print -quit 2>/dev/null)")
    export PATH="$work/root/usr/bin:$work/root/usr/sbin:/usr/sbin:$PATH" LD_LIBRARY_PATH="${plugins%/*}:$plugins"
}

configure() { # names that resolve everywhere; requeued jobs start after cred_expire seconds
    local name host ports
    name=$(id -un) host=$(hostname)
    read -ra ports < <(python -c 'import socket
free = [socket.create_server(("", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in free))')
    cat >"$SLURM_CONF" <<CONF
ClusterName=dyad
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$name
SlurmdUser=$name
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge.socket,cred_expire=5
PluginDir=$plugins
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
MailProg=/bin/true
MinJobAge=3600
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=127.0.0.1 NodeHostname=$host Port=${ports[1]} CPUs=1
NodeName=127.0.0.2 NodeHostname=$host Port=${ports[2]} CPUs=1
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=2
CONF
    mkdir "$work/state" "$work/spool-127.0.0.1" "$work/spool-127.0.0.2"
    head -c 128 /dev/urandom >"$work/munge.key"
    chmod 600 "$work/munge.key"
}

start() { # each in the foreground, to be stopped by its number
    munged --foreground --socket="$work/munge.socket" --key-file="$work/munge.key" --pid-file="$work/munged.pid" \
        --seed-file="$work/munge.seed" >"$work/munged.log" 2>&1 &
    daemons+=("$!")
    until [ -S "$work/munge.socket" ]; do sleep 0.2; done
    slurmctld-wlm -D -c >"$work/slurmctld.log" 2>&1 &
    daemons+=("$!")
    for node in 127.0.0.1 127.0.0.2; do
        slurmd-wlm -D -N "$node" -d "$(command -v slurmstepd-wlm)" >"$work/slurmd-$node.log" 2>&1 &
        daemons+=("$!")
    done
    until_true 60 both_idle
}

both_idle() { [ "$(sinfo --noheader --Node --format=%T 2>/dev/null | sort -u)" = idle ]; }

ours() { # the processes of this cluster and its jobs: all of them know its configuration
    grep -ls "SLURM_CONF=$work/slurm.conf" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

finish() { # whatever happened: jobs first, then daemons, then what is left after ten seconds
    local code=$? left=()
    trap '' INT TERM HUP
    timeout 10 scancel --user="$(id -un)" --signal=KILL --full 2>/dev/null || true
    unset SLURM_CONF # what is started from here on is not looked for
    kill "${daemons[@]}" 2>/dev/null || true
    for attempt in {1..60}; do
        mapfile -t left < <(ours)
        if [ "${#left[@]}" = 0 ]; then break; fi
        if [ "$attempt" -gt 20 ]; then kill -KILL "${left[@]}" 2>/dev/null || true; fi
        sleep 0.5
    done
    if [ "${#left[@]}" != 0 ]; then echo "FAILED: still running: ${left[*]}" && code=1; fi
    if [ "$code" != 0 ]; then tail -n 15 "$work"/*.log 2>/dev/null || true; fi
    if [ -n "${KEEP:-}" ]; then echo "kept: $work"; else rm -rf "$work"; fi
    if [ "$code" = 0 ]; then echo "all checks hold, nothing is left" && record tests/cluster/run.sh "$checks checks"; fi
    exit "$code"
}

# Checks ---------------------------------------------------------------------------------------------------------------

until_true() { # until_true SECONDS COMMAND…
    local end=$((SECONDS + $1))
    until "${@:2}"; do
        if [ "$SECONDS" -ge "$end" ]; then echo "FAILED: not within $1 s: ${*:2}" && return 1; fi
        sleep 0.5
    done
}

check() { # check WHAT COMMAND…
    if "${@:2}"; then checks=$((checks + 1)) && echo "ok ($SECONDS s): $1"; else echo "FAILED: $1: ${*:2}" && return 1; fi
}

submit() { # submit NAME ARGUMENT…: a job on both nodes that logs to NAME.log, and its number
    sbatch --parsable --nodes=2 --cpus-per-task=1 --output="$work/$1.log" launch/slurm.sbatch "${@:2}"
}

job_is() { # job_is NUMBER STATE…: COMPLETED, …
    [[ " ${*:2} " == *" $(fact "$1" JobState) "* ]]
}

fact() { scontrol show job "$1" | sed -nE "s/.*\b$2=(\S+).*/\1/p"; } # fact NUMBER KEY

ended() { job_is "$1" COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL; }

steps() { # steps NAME NUMBER: has the run logged so many?
    [ "$(cat "$runs/$1/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$2" ]
}

same_losses() { # of two runs, step by step, none missing and none twice
    python - "$runs/$1/metrics.jsonl" "$runs/$2/metrics.jsonl" <<'PY'
import json, sys
one, two = ([r for r in map(json.loads, open(path)) if "train/loss" in r] for path in sys.argv[1:])
assert [r["step"] for r in one] == [r["step"] for r in two] == list(range(1, len(one) + 1)), (len(one), len(two))
worst = max(abs(a["train/loss"] - b["train/loss"]) / abs(a["train/loss"]) for a, b in zip(one, two))
print(f"    {len(one)} steps, largest relative difference {worst:.1e}")
sys.exit(worst > 1e-5)
PY
}

same_bits() { # of two runs: every loss, and the weights and optimiser at the end
    python - "$runs/$1" "$runs/$2" <<'PY'
import hashlib, json, pathlib, sys
def bits(run):
    rows = map(json.loads, (run / "metrics.jsonl").open())
    files = sorted((run / "checkpoints/step_00000040").glob("*.safetensors"))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row], digests
one, two = (bits(pathlib.Path(run)) for run in sys.argv[1:])
assert len(one[0]) == 40 and one[1]
sys.exit(one != two)
PY
}

state() { sed -nE 's/.*"status": "([a-z]+)".*/\1/p' "$runs/$1/run_state.json"; }

restarts() { [ "$(fact "$1" Restarts)" = "$2" ]; } # restarts NUMBER COUNT

goes_on() { until_true 300 restarts "$1" "$2" && until_true 300 steps "$3" "$4"; } # goes_on NUMBER RESTARTS NAME STEPS

runs="$work/my runs"
# shellcheck disable=SC2016 # it must stay as it is
project='a  b {1,2} $HOME * x::y'
rate=optim.lr=1e-4 # low: rounding is not to grow from step to step
emoji=(experiment=emoji steps=40 global_batch_size=32
    tracking=local tracking.every=1 "tracking.project='$project'" "run.dir=$runs" 'model.image.widths=[8,16]' data.val=null
    'eval.suite=[retrieval:data/samples/emoji/twemoji-undrawn.tar]')

unpack
configure
start
check "$(sinfo --version), two nodes" both_idle

# --dry-run, and a mistake
dry=$(submit dry --dry-run "${emoji[@]}" "$rate" run.name=dry)
wrong=$(submit wrong "${emoji[@]}" "$rate" run.name=wrong chunk_size=0)
until_true 120 ended "$dry"
check "--dry-run ends well" job_is "$dry" COMPLETED
check "it shows the rendezvous" grep -q "MASTER_ADDR=127.0.0.1 .*MASTER_PORT=$((10000 + dry)) srun --nodes=2 " "$work/dry.log"
check "and the arguments as they are" grep -qF "$(printf '%q' "tracking.project='$project'")" "$work/dry.log"
until_true 120 ended "$wrong"
check "a mistake ends with exit code 2" [ "$(fact "$wrong" ExitCode)" = 2:0 ]
check "is told once" [ "$(grep -c "chunk_size=0" "$work/wrong.log")" = 1 ]
check "and leaves no run folder" [ ! -e "$runs" ]
check "and starts nothing again" restarts "$wrong" 0

# One process, two nodes
python -m train "${emoji[@]}" "$rate" run.name=one >"$work/one.log" 2>&1
both=$(submit two "${emoji[@]}" "$rate" run.name=two)
until_true 900 ended "$both"
check "a job on two nodes ends well" job_is "$both" COMPLETED
check "two processes trained" grep -q "world_size.*2" "$runs/two/checkpoints/step_00000040/state.json"
check "with the losses of one" same_losses one two
check "in one run folder" [ "$(ls "$runs")" = $'one\ntwo' ]
check "with the arguments as they were typed" grep -qxF "  project: $project" "$runs/two/config.yaml"

# In place of a container, another folder with an environment of its own
git clone -q . "$work/image"
export CONTAINER="env -C $work/image HOME=$HOME"
contained=$(submit contained "${emoji[@]}" "$rate" run.name=contained)
until_true 600 steps contained 3
scancel --batch --signal=USR1 "$contained"
check "told that its time is over, a job in a container queues again" until_true 300 restarts "$contained" 1
until_true 900 ended "$contained"
check "then it ends well, in its container" job_is "$contained" COMPLETED
check "with the losses of an undisturbed run outside" same_losses one contained
unset CONTAINER

# Its time is almost over; a more urgent job takes its place
stopped=$(submit stopped "${emoji[@]}" "$rate" run.name=stopped)
until_true 600 steps stopped 3
scancel --batch --signal=USR1 "$stopped" # what --signal=B:USR1@120 brings
check "told that its time is over, a job queues again and goes on" goes_on "$stopped" 1 stopped 8
urgent=$(sbatch --parsable --nodes=2 --partition=urgent --output=/dev/null --wrap true)
check "preempted, it queues again" until_true 120 restarts "$stopped" 2
check "the urgent job has run" until_true 60 job_is "$urgent" COMPLETED
until_true 900 ended "$stopped"
check "then it ends well" job_is "$stopped" COMPLETED
check "it saved twice" [ "$(grep -c "Stopped on request at step" "$work/stopped.log")" = 2 ]
check "with the losses of an undisturbed run" same_losses one stopped

# A process is killed; then a node is lost
tasks() { # tasks JOB VARIABLE=VALUE: the processes of a job's training steps with that variable
    local pid
    for pid in $(ours); do
        if [ "$(tr '\0' '\n' <"/proc/$pid/environ" | grep -cxE "$2|SLURM_JOB_ID=$1")" = 2 ]; then echo "$pid"; fi
    done 2>/dev/null
}

step_daemon() { # step_daemon JOB NODE_ID: the slurmstepd above a node's processes of a step
    local pid parent
    for pid in $(tasks "$1" "SLURM_NODEID=$2"); do
        parent=$(sed 's/.*) . //; s/ .*//' "/proc/$pid/stat")
        if grep -q slurmstepd "/proc/$parent/comm"; then echo "$parent" && return; fi
    done 2>/dev/null
    return 1
}

said() { grep -q "$2" "$work/$1.log"; } # said NAME PATTERN

lost=$(submit lost "${emoji[@]}" "$rate" run.name=lost checkpoint.every=5)
until_true 600 steps lost 8
mapfile -t killed < <(tasks "$lost" RANK=1)
kill -KILL "${killed[@]}"
check "a job goes on after the kill of a process" until_true 300 said lost "^restart 1 of 3 at step .*rank 1 of 2"
check "in the same allocation" restarts "$lost" 0
until_true 300 steps lost 15
scontrol update NodeName=127.0.0.2 State=DOWN Reason=test
check "without a node it queues again" until_true 120 restarts "$lost" 1
until_true 120 job_is "$lost" PENDING # not COMPLETING: SLURM would take the end of the old steps for that of the new
scontrol update NodeName=127.0.0.2 State=RESUME
until_true 900 ended "$lost"
check "then it ends well" job_is "$lost" COMPLETED
check "with the bits of an undisturbed run" same_bits two lost

# All processes of a node are killed; then its slurmstepd with them
hit=$(submit hit "${emoji[@]}" "$rate" run.name=hit checkpoint.every=5)
until_true 600 steps hit 8
mapfile -t killed < <(tasks "$hit" SLURM_NODEID=1)
kill -KILL "${killed[@]}"
check "a job goes on after the kill of all processes of a node" until_true 300 said hit "^restart 1 of 3 at step "
check "in the same allocation, too" restarts "$hit" 0
until_true 300 steps hit 18
daemon=$(step_daemon "$hit" 1)
mapfile -t killed < <(tasks "$hit" SLURM_NODEID=1)
kill -KILL "$daemon" "${killed[@]}"
check "also of its slurmstepd" until_true 300 said hit "^restart 2 of 3 at step "
check "the node that failed twice is named" said hit "^node $(hostname) has failed 2 times .*--exclude=$(hostname)"
until_true 900 ended "$hit"
check "then it ends well, too" job_is "$hit" COMPLETED
check "having queued again, as SLURM holds the lost step" restarts "$hit" 1
check "with the bits of an undisturbed run, too" same_bits two hit

# A mistake that shows after some steps
broken=$(submit broken "${emoji[@]}" run.name=broken checkpoint.every=1 optim.lr=1e12)
until_true 300 ended "$broken"
check "a mistake that shows later ends with exit code 2" [ "$(fact "$broken" ExitCode)" = 2:0 ]
check "after new checkpoints" [ -e "$runs/broken/checkpoints/step_00000001" ]
check "and starts nothing again" restarts "$broken" 0
check "nor records a failure of hardware" [ "$(find "$runs/broken" -name restarts.jsonl; grep restart "$work/broken.log")" = "" ]

# Not wanted any more
unwanted=$(submit unwanted "${emoji[@]}" "$rate" run.name=unwanted)
until_true 600 steps unwanted 2
scancel "$unwanted"
until_true 120 ended "$unwanted"
check "a cancelled job saves" [ "$(state unwanted)" = preempted ]
check "and does not queue again" job_is "$unwanted" CANCELLED
