"""launch/slurm.sbatch as far as it goes without SLURM. On a real one: bash tests/cluster/run.sh"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import ROOT

from dyad.run.checks import check_arguments
from dyad.train.cli.usage import help_text

SCRIPT = ROOT / "launch" / "slurm.sbatch"
OUTSIDE = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"DYAD_EXTRAS": "demo"}
ALLOCATED = {
    "SLURM_JOB_ID": "4123456",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu-a[007-008,012]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}


def sbatch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, env=OUTSIDE | environment, capture_output=True, text=True, timeout=120)


def shell(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `lines` with the functions of launch/job.sh; arguments are $1, $2, …"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", f"set -euo pipefail; source launch/job.sh; {lines}", "-", *arguments]
    return subprocess.run(command, cwd=ROOT, env=OUTSIDE | {"PATH": path}, capture_output=True, text=True, timeout=60)


def stubs(folder: Path, **scripts: str) -> str:
    """A PATH on which these commands are bash scripts in `folder`."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}")
        (folder / name).chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


# What would run ------------------------------------------------------------------------------------------------------


def test_dry_run_in_a_job_that_was_queued_again(tmp_path: Path) -> None:
    """It goes on with the run that it has begun, however the first start began; --dry-run may stand anywhere."""
    (tmp_path / "a  b").mkdir()
    state = tmp_path / "a  b" / "run_state.json"
    state.write_text(json.dumps({"status": "running", "job": ALLOCATED["SLURM_JOB_ID"]}, indent=1))
    arguments = ["experiment=emoji", f"run.dir={tmp_path}", "run.name=a  b", "eval.suite=[]"]
    arguments.append("tracking.project='{1,2} $HOME * \"x\" y::z'")
    planned = sbatch("resume=never", *arguments, "--dry-run", **ALLOCATED, SLURM_RESTART_COUNT="1")
    assert planned.returncode == 0, planned.stderr
    folder, job, node = [line for line in planned.stdout.splitlines() if not line.endswith(":")]
    assert folder == f"run folder: {tmp_path}/a  b"
    assert shlex.split(job) == [
        *["env", "NNODES=3", "NPROC=8", "RDZV_ID=4123456", "MASTER_ADDR=gpu-a007", "MASTER_PORT=13456"],
        *["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=64", "--export=ALL"],
        *["--kill-on-bad-exit=0", "--wait=600", "bash", "launch/torchrun.sh", *arguments],
    ]
    words = shlex.split(node)
    assert words[:3] == ["python", "-m", "train.distributed.agent"]
    assert words[-8:] == ["python", "-m", "train", *arguments]
    assert {"--nnodes=3", "--node-rank=0", "--rdzv-endpoint=gpu-a007:13456", "--nproc-per-node=8"} <= set(words)


@pytest.mark.parametrize("job", ["4123455", None])
def test_a_job_that_was_queued_again_before_it_began_does_not_go_on_with_the_run_of_another(
    tmp_path: Path, job: str | None
) -> None:
    """The run that resume=never puts aside is still there, or only its folder is."""
    (tmp_path / "a" / "checkpoints" / "step_00000007").mkdir(parents=True)
    (tmp_path / "a" / "config.yaml").write_text("seed: 1\n")  # it could not go on
    (tmp_path / "a" / "run_state.json").write_text(json.dumps({"status": "finished", "step": 7, "job": job}))
    arguments = ["experiment=emoji", f"run.dir={tmp_path}", "run.name=a", "resume=never"]
    planned = sbatch("--dry-run", *arguments, **ALLOCATED, SLURM_RESTART_COUNT="1")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("resume=never") == 2, planned.stdout


def test_dry_run_where_there_is_no_job() -> None:
    planned = sbatch("--dry-run", "experiment=emoji", "run.name=a", SBATCH_SIGNAL="B:USR1")
    assert planned.returncode == 0, planned.stderr
    assert "srun --nodes=1 " in planned.stdout and "--cpus-per-task" not in planned.stdout
    assert "--standalone --nproc-per-node=1 " in planned.stdout


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    no_job = sbatch("experiment=emoji")
    assert no_job.returncode == 2 and no_job.stderr.startswith("error: not in a SLURM job. Submit it: sbatch ")
    elsewhere = sbatch("experiment=emoji", **ALLOCATED, SLURM_SUBMIT_DIR=str(tmp_path))
    assert elsewhere.returncode == 2 and elsewhere.stderr.startswith(f"error: {tmp_path} is not the root of the repo")
    mistake = sbatch("experiment=emoji", "optim.lr=-1", **ALLOCATED)
    assert mistake.returncode == 2 and mistake.stderr.count("optim.lr=-1") == 1


def test_slurm_reads_what_is_asked_of_it() -> None:
    """Its lines count only before the first command."""
    head = SCRIPT.read_text().split("set -euo pipefail")[0]
    asked = re.findall(r"^#SBATCH (\S+)$", head, re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(asked)


def test_a_sweep_submits_a_job_for_each_run(tmp_path: Path) -> None:
    """By the line that --help shows; this sbatch shows what its job is given."""
    line = next(line for line in help_text().splitlines() if "jobs of SLURM: " in line).partition("SLURM: ")[2]
    swept = f"-m experiment=emoji run.dir='{tmp_path}/a b' optim.lr=1e-3,2e-3"
    path = stubs(tmp_path, sbatch='[ "$2" = launch/slurm.sbatch ] && printf "%q " "${@:3}" && echo')
    command = ["bash", "-euo", "pipefail", "-c", line.replace("-m …", swept)]
    done = subprocess.run(command, cwd=ROOT, env=OUTSIDE | {"PATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folders = {check_arguments(shlex.split(job)) for job in done.stdout.splitlines()}
    assert len(folders) == 2 and all(str(folder).startswith(f"{tmp_path}/a b/emoji-") for folder in folders)


# In a container ------------------------------------------------------------------------------------------------------


def test_dry_run_of_a_container() -> None:
    """Its words stand between the options of srun and the command; nothing of it runs, and no Python."""
    planned = sbatch("--dry-run", "experiment=emoji", CONTAINER="apptainer exec --nv dyad.sif", PATH="/usr/bin:/bin")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.endswith(
        " --wait=600 apptainer exec --nv dyad.sif bash launch/entrypoint.sh torchrun experiment=emoji \n"
    )


def test_a_job_asks_its_container(tmp_path: Path) -> None:
    """Which has another root than the job, with an environment of its own. srun here runs all but the training."""
    image = tmp_path / "image"
    image.mkdir()
    for entry in ("launch", "dyad", "data", "train", "eval", "configs", "pyproject.toml", "requirements.lock"):
        (image / entry).symlink_to(ROOT / entry)
    srun = 'while [[ $1 == --* ]]; do shift; done; case "$*" in *" torchrun "*) echo "$*" ;; *) exec "$@" ;; esac'
    path = stubs(tmp_path, srun=srun, squeue="", scontrol="")
    own = ALLOCATED | {
        "PATH": f"{path.split(':')[0]}:/usr/bin:/bin",  # without our Python
        "DYAD_PYTHON": sys.executable,
        "DYAD_VENV": (ROOT / ".venv" / ".dyad").read_text().split()[-1],
        "CONTAINER": f"env -C {image}",
    }
    arguments = ["experiment=emoji", f"run.dir={tmp_path}/runs", "run.name=a"]
    refused = sbatch(*arguments, "optim.lr=-1", **own)
    assert refused.returncode == 2 and refused.stderr.count("optim.lr=-1") == 1, refused
    assert (image / ".venv").is_dir()
    started = sbatch(*arguments, **own)
    words = shlex.join(["env", "-C", str(image), "bash", "launch/entrypoint.sh", "torchrun", *arguments])
    assert (started.returncode, started.stdout) == (0, f"{words}\n"), started


# A job that loses a rank ---------------------------------------------------------------------------------------------

# srun in its place: the n-th start ends with the n-th of $CODES, and with a checkpoint more
SRUN = """
if [ "${!#}" = true ]; then exit "$DEAD"; fi
[ -e "$FOLDER/starts" ] || { mkdir -p "$FOLDER/checkpoints" && echo "dist: {restarts: 1}" >"$FOLDER/config.yaml"; }
echo "$*" >>"$FOLDER/starts"
starts=$(wc -l <"$FOLDER/starts") codes=($CODES)
mkdir "$FOLDER/checkpoints/step_0000000$starts"
echo '{"status": "failed", "step": '$((starts - 1))', "error": "PeerFailure: lost", "hosts": ["n2"]}' \\
    >"$FOLDER/run_state.json"
exit "${codes[starts - 1]}"
"""


FIRST = "restart 1 of 1 at step 1: lost"


@pytest.mark.parametrize(
    ("codes", "starts", "nodes", "dead", "told"),
    [
        ("4 4 0", 2, 2, 0, [FIRST, "no restart: dist.restarts=1"]),
        ("4 0", 1, 2, 1, [FIRST]),  # it queues again
        pytest.param("2 0", 1, 2, 0, [], marks=pytest.mark.soak),  # so does the 75 of a stopped task, below
        ("4 0", 1, 1, 0, []),  # on one node torchrun.sh goes on
    ],
)
def test_a_job_goes_on_with_its_nodes(
    tmp_path: Path, codes: str, starts: int, nodes: int, dead: int, told: list[str]
) -> None:
    """It begins with resume=never where there is no checkpoint yet, and where it was not queued again."""
    path = stubs(tmp_path, srun=SRUN, squeue="", scontrol='echo "$*"')
    own = {"CODES": codes, "FOLDER": str(tmp_path / "a"), "DEAD": str(dead), "PATH": path}
    own |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_RESTART_COUNT": str(dead)}
    if nodes == 1:
        (tmp_path / "a" / "checkpoints" / "step_00000000").mkdir(parents=True)
    arguments = ["experiment=emoji", "resume=never", f"run.dir={tmp_path}", "run.name=a"]
    ended = sbatch(*arguments, **{**ALLOCATED, **own})
    assert ended.returncode == int(codes.split()[starts - 1]), ended
    commands = (tmp_path / "a" / "starts").read_text().splitlines()
    assert ["resume=never" in command for command in commands] == [True, *[False] * (starts - 1)]
    assert all("launch/torchrun.sh experiment=emoji " in command for command in commands)
    assert [line for line in ended.stdout.splitlines() if "restart" in line] == told
    assert ("node n2 has failed 2 times in this run: leave it out" in ended.stdout) is (starts > 1)
    assert ended.stdout.count(f"requeue {ALLOCATED['SLURM_JOB_ID']}") == dead


ARRAY = {"SLURM_ARRAY_JOB_ID": ALLOCATED["SLURM_JOB_ID"], "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize("array", [pytest.param({}, marks=pytest.mark.soak), ARRAY])
def test_a_stopped_task_of_an_array_queues_again_alone(tmp_path: Path, array: dict[str, str]) -> None:
    """The last task has the number of the array, of which squeue lists each task."""
    own = "_".join(array.values()) or ALLOCATED["SLURM_JOB_ID"]
    stopped = 'echo \'{"status": "preempted", "step": 5, "time": "12:00"}\' >"$FOLDER/run_state.json"; exit 75'
    squeue = f'[ "${{!#}}" = {own} ] || echo RUNNING; echo RUNNING'
    path = stubs(tmp_path, srun=f'mkdir "$FOLDER"; {stopped}', squeue=squeue, scontrol='echo "$*"')
    arguments = ["experiment=emoji", f"run.dir={tmp_path}", "run.name=a"]
    ended = sbatch(*arguments, **ALLOCATED, **array, FOLDER=str(tmp_path / "a"), PATH=path)
    assert ended.returncode == 75 and ended.stdout.splitlines()[-1] == f"requeue {own}", ended


@pytest.mark.parametrize(
    "srun",
    [
        "exit 75",  # the trainers were signalled
        'kill -USR1 "$(cut -d" " -f4 "/proc/$PPID/stat")"; exit 138',  # the job was, before that
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_is_stopped_before_its_first_start_trains_queues_again_once(
    tmp_path: Path, srun: str, restarts: int
) -> None:
    path = stubs(tmp_path, srun=srun, squeue="echo RUNNING", scontrol='echo "$*"')
    own = {**ALLOCATED, "PATH": path, "SLURM_RESTART_COUNT": str(restarts)}
    if "kill" in srun:
        own["CONTAINER"] = "apptainer exec dyad.sif"
    ended = sbatch("experiment=emoji", f"run.dir={tmp_path}", "run.name=a", **own)
    assert ended.returncode == 75 and ended.stdout.count(f"requeue {ALLOCATED['SLURM_JOB_ID']}") == 1 - restarts, ended
    assert ("does not queue again" in ended.stderr) is bool(restarts)


# The pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("a[07-09,12],b3", "a07"),
        ("r[1-2]n[30-40,50]-x", "r1n30-x"),
        ("10.0.0.[1-2]", "10.0.0.1"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert shell('dyad_first_node "$1"', nodes).stdout == f"{first}\n"


@pytest.mark.parametrize(
    ("code", "restarts", "before", "after", "again"),
    [
        (75, 0, "none 0 never", "preempted 5 12:00", True),
        (75, 0, "preempted 5 11:00", "preempted 9 12:00", True),
        (75, 0, "finished 9 11:00", "preempted 5 12:00", True),  # resume=never
        (138, 0, "none 0 never", "preempted 5 12:00", True),  # srun was killed
        (75, 0, "none 0 never", "none 0 never", True),  # before it began
        (75, 1, "none 0 never", "none 0 never", False),
        (75, 1, "preempted 5 11:00", "preempted 9 12:00", True),
        (75, 1, "preempted 5 11:00", "preempted 5 12:00", False),  # no step
        (2, 0, "preempted 5 11:00", "preempted 5 11:00", False),  # refused
        (2, 0, "none 0 never", "none 0 never", False),
        (0, 0, "none 0 never", "finished 9 12:00", False),
        (4, 3, "preempted 5 11:00", "failed 9 12:00", False),
        (4, 3, "preempted 5 11:00", "running 9 12:00", False),
    ],
)
def test_a_job_queues_again_when_stopped_and_as_a_restart_only_with_something_done(
    code: int, restarts: int, before: str, after: str, again: bool
) -> None:
    asked = shell('dyad_requeue "$@"', str(code), str(restarts), before, after)
    assert (asked.returncode == 0) is again and asked.stderr == ""


def test_the_state_of_a_run_folder(tmp_path: Path) -> None:
    assert shell('dyad_state "$1"', str(tmp_path / "none")).stdout == "none 0 never\n"
    (tmp_path / "run_state.json").write_text(json.dumps({"status": "preempted", "step": 7, "time": "12:00"}))
    assert shell('dyad_state "$1"', str(tmp_path)).stdout == "preempted 7 12:00\n"
    (tmp_path / "run_state.json").write_text('{"status": "preem')
    assert shell('dyad_state "$1"', str(tmp_path)).stdout == "none 0 never\n"


def test_processes_are_bound_where_there_is_something_to_bind(tmp_path: Path) -> None:
    (tmp_path / "numactl").write_text("#!/bin/sh\n")
    (tmp_path / "numactl").chmod(0o755)
    bound = f'PATH="$PATH:{tmp_path}" dyad_numa'
    assert shell(f"CUDA_VISIBLE_DEVICES=0 {bound} /dev/null").stdout == "--numa-binding=node\n"
    for lines in (
        f"CUDA_VISIBLE_DEVICES=0 {bound} /dev/no-second-node",
        f"CUDA_VISIBLE_DEVICES=-1 {bound} /dev/null",
        f"CUDA_VISIBLE_DEVICES=NoDevFiles {bound} /dev/null",
        f"CUDA_VISIBLE_DEVICES= {bound} /dev/null",
        f"nproc() {{ echo 0; }}; env() {{ echo 0; }}; CUDA_VISIBLE_DEVICES=0 {bound} /dev/null",
    ):
        done = shell(lines)
        assert (done.returncode, done.stdout) == (0, ""), (lines, done)


def test_the_lead_of_the_signal_is_a_number() -> None:
    wrong = sbatch("--dry-run", "experiment=emoji", SBATCH_SIGNAL="B:USR1@soon")
    assert wrong.returncode == 2 and "SBATCH_SIGNAL=soon is no whole number" in wrong.stderr


def test_a_run_that_began_at_a_checkpoint_goes_on_by_itself() -> None:
    """Only resume=never would begin it again."""
    lines = 'dyad_going_on "$@"; printf "%s\n" "${arguments[@]}"'
    given = ["run.name=a  b", "resume=/runs/a", "resume=never", "resume.mode=never"]
    assert shell(lines, *given).stdout.splitlines() == given[:2]


def test_a_signal_does_not_end_the_wait() -> None:
    waited = shell(
        "trap 'echo asked' USR1; (sleep 0.3; kill -USR1 $$; sleep 0.3; exit 7) & dyad_attend $! || echo ended with $?"
    )
    assert waited.stdout == "asked\nended with 7\n"
