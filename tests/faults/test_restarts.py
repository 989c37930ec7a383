"""A job goes on by itself after a hardware failure. The rules: tests/train/run_folder/test_failure_records.py."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from harness import IMAGES, Job, Jobs, cut, digest, newest_whole
from helpers.cli import ROOT
from helpers.tiny_runs import SHARD, losses

from dyad.train.run_folder.restarts import RESTARTS, UNKNOWN


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / RESTARTS).read_text().splitlines()]


def new_checkpoint(job: Job) -> int:
    """Wait for a checkpoint, and return the step of the newest."""
    begun = newest_whole(job.run)
    job.until(lambda: newest_whole(job.run) > begun, "a checkpoint")
    return newest_whole(job.run)


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_torchruns_agent_is_killed(kills: int, jobs: Jobs) -> None:
    """The job goes on once, as dist.restarts=1 says, with the bits of no kill; then by the same command."""
    steps = 60
    keys = {**IMAGES, "steps": steps, "checkpoint.every": 10}
    job = jobs.launch(1, {**keys, "dist.restarts": 1, "resume": "never"})
    new_checkpoint(job)
    os.kill(job.agent(), SIGKILL)
    job.until(lambda: "restart 1 of 1" in job.said(), "its restart")
    if kills > 1:
        new_checkpoint(job)
        os.kill(job.agent(), SIGKILL)
    outcome = job.ends(within=120)
    assert outcome.codes == [4 if kills > 1 else 0] and not outcome.orphans, outcome.out
    told = entries(job.run)
    assert [(entry["cause"], entry["restart"]) for entry in told] == [(UNKNOWN, 1), (UNKNOWN, 0)][:kills]
    said = [line for line in outcome.out.splitlines() if re.match("(no )?restart", line)]
    step = told[0]["step"]
    assert said == [f"restart 1 of 1 at step {step}: {UNKNOWN}", "no restart: dist.restarts=1"][:kills]
    assert f"going on at step {step} from" in outcome.out and said[0] in (job.run / "log.txt").read_text()
    assert len(losses(job.run)) == steps or kills > 1
    if kills > 1:
        run, undisturbed = jobs.run(1, keys), jobs.run(1, {**keys, "run.name": "undisturbed"})
        assert digest(run) == digest(undisturbed) and losses(run) == losses(undisturbed)


@pytest.mark.soak
def test_a_job_ends_by_itself_after_the_kills_of_both_ranks(jobs: Jobs) -> None:
    keys = {"steps": 200, "checkpoint.every": 5, "data.workers": 1}
    job = jobs.launch(2, {**keys, "dist.restarts": 2, "resume": "never"})
    for restart in (1, 2):
        new_checkpoint(job)
        job.signal(SIGKILL, rank=restart - 1)
        job.until(lambda: f"restart {restart} of 2" in job.said(), "its restart")  # noqa: B023
        job.until(lambda: len(job.ranks()) == 2, "its trainers")
    outcome = job.ends(within=300)
    assert outcome.codes == [0] and not outcome.orphans, outcome.out
    for number, entry in enumerate(entries(job.run)):
        assert f"rank {number} of 2" in entry["cause"] and entry["hosts"] == [socket.gethostname()]
        line = f"restart {number + 1} of 2 at step {entry['step']}: {entry['cause']}"
        assert outcome.out.count(line) == 1 and line in (job.run / "log.txt").read_text()
    assert (
        outcome.out.count(f"{socket.gethostname()}: rank 1 was killed by SIGKILL\n") == 1
        and "has failed" not in outcome.out
    )
    run, undisturbed = job.run, jobs.run(2, {**keys, "run.name": "undisturbed"})
    assert digest(run) == digest(undisturbed) and losses(run) == losses(undisturbed)


SRUN = """#!/bin/bash
[ "${!#}" != true ] || exit 0
while [[ $1 == --* ]]; do shift; done
nodes=() last=0
for node in 0 1; do SLURM_NODEID=$node "$@" & nodes+=("$!"); done
for node in "${nodes[@]}"; do wait "$node" || last=$(($? > last ? $? : last)); done
if [ "$last" != 0 ] && mkdir "$HANGS"; then exec sleep 1000; fi
exit "$last"
"""


@pytest.mark.soak
@pytest.mark.parametrize("hangs", [False, True])
def test_a_job_of_two_nodes_goes_on_after_the_kill_of_a_rank(jobs: Jobs, tmp_path: Path, hangs: bool) -> None:
    """By launch/slurm.sbatch; its srun starts both nodes here. hangs: it waits for a node that lost its slurmstepd."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    keys = {"steps": 200, "checkpoint.every": 5}
    port = random.randrange(10_000, 30_000)
    place = {"SLURM_JOB_ID": str(port - 10_000), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost"}
    place |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    place["HANGS"] = str(tmp_path / "hangs") if hangs else "/dev/null"  # a folder that is made once, or never
    job = jobs.launch(1, keys, on=["bash", "-c", 'exec bash launch/slurm.sbatch "${@:2}"'], **place)
    job.until(lambda: newest_whole(job.run) >= 5, "its first checkpoint")
    job.signal(SIGKILL, rank=0)
    outcome = job.ends(within=300)
    assert outcome.codes == [0] and not outcome.orphans, outcome.out
    assert re.search("^restart 1 of 3 at step .* rank 0 of 2", outcome.out, re.MULTILINE)
    assert digest(job.run) == digest(jobs.run(2, {**keys, "run.name": "undisturbed"}))


@pytest.mark.soak
def test_what_no_restart_mends_is_told_once(jobs: Jobs, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(SHARD, tmp_path / "damaged.tar"))
    cut(damaged, damaged.stat().st_size // 2)
    for code, keys in ((2, {"optim.lr": -1}), (3, {"data.train": damaged})):
        outcome = jobs.launch(1, keys).ends(within=120)
        assert outcome.codes == [code] and outcome.out.count("error: ") == 1, outcome.out
        assert not re.search("^(no )?restart", outcome.out, re.MULTILINE)
