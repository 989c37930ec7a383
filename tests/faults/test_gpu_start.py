"""The start on GPU machines, as far as it shows without a GPU; and a GPU whose memory runs out."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Jobs
from helpers.cli import ROOT, Commands
from helpers.tiny_runs import refused
from test_detection import LONG, told_once, with_fault
from test_resume import stopped

Tiny = Callable[[dict[str, Any]], list[str]]
SMI = """#!/bin/sh
case "$1" in
    -L) printf "$SHOWN" ;;
    *) echo "NVIDIA H100 80GB HBM3, 535.129.03" ;;
esac
"""
ONE_GPU = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\\n"
SLICES = ONE_GPU + "  MIG 1g.10gb  Device 0: (UUID: MIG-1)\\n  MIG 1g.10gb  Device 1: (UUID: MIG-2)\\n"


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """A PATH with an nvidia-smi that shows a GPU, which torch cannot use."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    return f"{tmp_path / 'bin'}:/usr/bin:/bin"


def test_gpus_that_torch_cannot_use_are_refused_once(commands: Commands, tiny: Tiny, driver: str) -> None:
    ended = commands.world(2, *tiny({}), PATH=driver)
    assert [e.code for e in ended] == [4, 4]
    refused(ended[0], 4, "NVIDIA H100 80GB HBM3", "535.129.03", "DYAD_TORCH_INDEX", "CUDA_VISIBLE_DEVICES=")
    assert not ended[1].out


def test_hidden_gpus_leave_cpus_and_the_first_line_names_them(commands: Commands, tiny: Tiny, driver: str) -> None:
    ended = commands.world(2, *tiny({"steps": 1, "data.workers": "auto"}), PATH=driver, CUDA_VISIBLE_DEVICES="")
    assert [e.code for e in ended] == [0, 0], ended
    assert "2 processes on CPU, gloo, fp32, 2 loader workers each" in ended[0].out.splitlines()[0]


def test_tasks_of_srun_without_torchrun_are_refused(commands: Commands, tiny: Tiny) -> None:
    refused(commands.run(*tiny({}), SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="0"), 2, "8 tasks", "launch/torchrun.sh")
    assert commands.run(*tiny({}), SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="1").out == ""


def test_the_start_has_a_timeout_of_its_own(jobs: Jobs) -> None:
    outcome = jobs.start(2, {"dist.start_timeout": 2}, coming=[0]).ends(within=60)
    assert outcome.codes == [4] and "rank 0 of 2: cannot join the other processes" in outcome.out


def test_a_resumed_run_keeps_its_precision(jobs: Jobs) -> None:
    keys: dict[str, Any] = {"steps": 6, "checkpoint.every": 2}
    stopped(jobs, 1, {**keys, "precision": "bf16"}, 3)
    job = jobs.start(1, keys)
    outcome = job.ends()
    assert outcome.codes == [0] and "precision=auto takes bf16, not fp32" in outcome.out, outcome.out
    assert yaml.safe_load((job.run / "config.yaml").read_text())["precision"] == "bf16"
    outcome = jobs.start(1, {**keys, "precision": "fp32", "resume.allow_more_data": "true"}).ends()
    assert outcome.codes == [2] and "precision: bf16 there, fp32 now" in outcome.out


def test_out_of_memory_is_one_line_and_ends_all(jobs: Jobs) -> None:
    keys = {**LONG, "dist.timeout": 90, "global_batch_size": 48, "chunk_size": 16}
    job = with_fault(jobs, 2, keys, "out_of_memory@7", ON="1")
    job.reaches(6)
    outcome = job.ends(within=60)  # before that timeout
    assert outcome.codes == [4, 4] and not outcome.orphans
    told_once(outcome, "rank 1: CUDA out of memory", "GiB at the peak", "chunk_size is 16 of 24", "Set chunk_size=12")


GPUS: dict[str, tuple[dict[str, str], int]] = {
    "two": ({"SHOWN": ONE_GPU * 2}, 2),
    "none": ({"SHOWN": ""}, 0),
    "slices": ({"SHOWN": SLICES}, 1),
    "hidden": ({"SHOWN": ONE_GPU, "CUDA_VISIBLE_DEVICES": ""}, 0),
    "hidden by SLURM": ({"SHOWN": ONE_GPU, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    "chosen": ({"SHOWN": ONE_GPU * 8, "CUDA_VISIBLE_DEVICES": "0,2, 5"}, 3),
    "chosen up to -1": ({"SHOWN": ONE_GPU * 8, "CUDA_VISIBLE_DEVICES": "0,-1,5"}, 1),
    "chosen slices": ({"SHOWN": SLICES, "CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, 1),
}


@pytest.mark.parametrize("case", GPUS)
def test_the_launcher_counts_gpus_as_cuda_does(case: str, driver: str) -> None:
    environment, count = GPUS[case]
    command = ["bash", "-euo", "pipefail", "-c", "source launch/job.sh; dyad_gpus"]
    shown = subprocess.run(command, cwd=ROOT, env={"PATH": driver, **environment}, capture_output=True, text=True)
    assert (shown.stdout, shown.returncode) == (f"{count}\n", 0), shown


def test_a_run_keeps_the_precision_of_the_checkpoint_it_goes_on_from(commands: Commands, tiny: Tiny) -> None:
    """Also under another run.name, and in a folder of folders, where config.yaml lies beside the checkpoints."""
    first = tiny({"steps": 2, "precision": "bf16", "run.name": "group/a"})
    assert commands.run(*first).code == 0
    folder = Path(next(word for word in first if word.startswith("run.dir=")).removeprefix("run.dir=")) / "group" / "a"
    assert (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()
    checkpoint = max((folder / "checkpoints").glob("step_*"))
    ended = commands.run(*tiny({"steps": 4, "run.name": "b", "resume.mode": str(checkpoint)}))
    assert ended.code == 0 and "precision=auto takes bf16, not fp32" in ended.out, ended.out
