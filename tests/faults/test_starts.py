"""Starts on a machine where something is wrong, and on data of awkward sizes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
from harness import Jobs, ids_of_steps
from helpers.cli import ROOT, Commands, free_port
from helpers.shards import write_pairs
from helpers.tiny_runs import QUIET, losses, refused, state
from test_signals import CONNECTED, has_socket

PAIRS = {"data": "image_text", "data.val": "null"}


def test_a_rank_never_starts(jobs: Jobs) -> None:
    outcome = jobs.start(2, {"dist.timeout": 2, "dist.start_timeout": 2}, coming=[0]).ends(within=60)
    assert outcome.codes == [4] and not outcome.orphans
    assert "rank 0 of 2: cannot join the other processes" in outcome.out and "1/2 clients joined" in outcome.out


def test_rank_0_ends_before_the_others_have_met_it(jobs: Jobs) -> None:
    job = jobs.start(2, {}, coming=[1])
    job.until(lambda: "rank 1 of 2 waits for rank 0: nobody answers at localhost:" in job.said(), "its words")
    assert "dist.start_timeout (600 s)" in job.said()


def test_rank_0_is_killed_while_another_waits_with_it(jobs: Jobs) -> None:
    # torch reports a broken connection at once, and connects again until the timeout if no answer had come by it
    job = jobs.start(3, {"dist.start_timeout": 8}, coming=[0, 1])
    job.until(lambda: has_socket(job.ranks()[1], CONNECTED), "the connection")
    job.signal(SIGKILL, rank=0)
    outcome = job.ends(within=20)
    assert outcome.codes == [-SIGKILL, 4] and not outcome.orphans, outcome


def test_a_start_that_is_refused_leaves_nothing(commands: Commands, tiny, tmp_path: Path) -> None:
    keys, runs = {**QUIET, "steps": 2, "eval.suite": "[]"}, tmp_path / "runs"
    assert commands.run(*tiny({**keys, "run.name": "a"})).code == 0
    (sound,) = (runs / "a/checkpoints").iterdir()
    damaged, other = tmp_path / "damaged/step_00000002", {"model.image.widths": [16, 16]}
    shutil.copytree(sound, damaged)
    reseal(damaged, "state.json", b'"samples_seen": 64', b'"samples_seen": 1e999')
    before = set(tmp_path.rglob("*"))
    for code, named, refused_keys in [
        (2, "init_from", {**other, "init_from": runs / "a"}),
        (2, sound, {**other, "resume": sound}),
        (3, "samples_seen", {"resume": damaged}),
        (2, "negatives_per_positive", {"objective": "binary_nce", "objective.negatives_per_positive": 32}),
        (2, "importance_file", {"objective": "one_sided_dpm", "objective.importance": "zeta"}),
        (2, "global_batch_size=5000", {"global_batch_size": 5000}),
    ]:
        ended = commands.run(*tiny({**keys, "run.dir": tmp_path / "new/deeper", **refused_keys}))
        refused(ended, code, named)
        assert {path for path in set(tmp_path.rglob("*")) - before if path.suffix != ".txt"} == set(), named


def reseal(checkpoint: Path, name: str, old: bytes, new: bytes) -> None:
    """Change a file, and the manifest with it, as somebody else could."""
    content = (checkpoint / name).read_bytes()
    assert old in content
    (checkpoint / name).write_bytes(content.replace(old, new))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    changed = (checkpoint / name).read_bytes()
    manifest["files"][name] = {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.soak
def test_the_port_of_a_cluster_job_is_in_use(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        place = {"NNODES": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outcome = jobs.launch(1, {}, **place).ends(within=120)
    assert outcome.codes == [4] and not outcome.orphans
    assert outcome.out == f"error: MASTER_PORT={port}: Address already in use. Choose another port\n"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"NPROC": "0"}, "NPROC=0 is no number from 1 to 65535"),
        ({"NNODES": "0"}, "NNODES=0 is no number from 1 to 65535"),
        ({"NNODES": "2"}, "NNODES=2: set MASTER_ADDR to the name of the first machine, on each machine"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "abc"}, "MASTER_PORT=abc is no whole number"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no number from 1 to 65535"),
    ],
)
def test_a_job_that_cannot_be_is_refused_also_before_it_starts(place: dict[str, str], said: str) -> None:
    command = ["bash", "launch/torchrun.sh", "--dry-run", "experiment=emoji"]
    given = {**os.environ, "NPROC": "1", **place}
    ended = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"error: {said}\n")


def test_the_first_machine_is_not_found(jobs: Jobs) -> None:
    nowhere = {"NNODES": "2", "MASTER_ADDR": "no-such-host.invalid"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        taken = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for place, said in (
            (nowhere, "MASTER_ADDR=no-such-host.invalid cannot be resolved: "),
            (taken, f"MASTER_PORT={port}: another program answers at 127.0.0.1:{port}. Choose another port"),
        ):
            outcome = jobs.launch(1, {}, **place).ends(within=120)
            assert outcome.codes == [4] and not outcome.orphans, outcome
            (line,) = outcome.out.splitlines()
            assert line.startswith(f"error: {socket.gethostname()}: {said}")


def test_the_second_machine_does_not_come(jobs: Jobs) -> None:
    port = free_port()
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outcome = jobs.launch(1, {"dist.start_timeout": 12}, **place).ends(within=120)
    assert outcome.codes == [4] and not outcome.orphans, outcome
    own, others = socket.gethostname(), f"the other machines (NNODES=2) at 127.0.0.1:{port}"
    waits, gives_up = outcome.out.splitlines()
    assert waits == f"{own} waits for {others}"
    assert gives_up.startswith(f"error: {own} has no contact to {others}, given dist.start_timeout: ")


def test_each_of_two_machines_says_how_it_ended(jobs: Jobs) -> None:
    port = free_port()
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = (jobs.launch(1, {"steps": 5000, "data.workers": 1}, **place) for _ in range(2))
    first.reaches(2)
    os.kill(second.script.pid, SIGTERM)
    line = f"{socket.gethostname()} ended with code 75: rank 0 prints the reason"
    for ended in (first.ends(within=120), second.ends(within=120)):
        assert ended.codes == [75] and not ended.orphans and ended.out.splitlines().count(line) == 1, ended


@pytest.mark.soak
def test_one_shard_for_four_ranks_with_three_workers_each(jobs: Jobs) -> None:
    keys = {**QUIET, "steps": 13}
    one = jobs.run(1, {**keys, "run.name": "one"}, observed=True)
    four = jobs.run(4, {**keys, "data.workers": 3}, observed=True)
    assert ids_of_steps(four) == ids_of_steps(one)
    assert losses(four) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.soak
def test_shards_of_very_different_sizes(jobs: Jobs, tmp_path: Path) -> None:
    sizes, first = (1, 2, 7, 30, 100, 201, 500), 0
    for number, size in enumerate(sizes):
        write_pairs(tmp_path / f"{number}.tar", size, first)
        first += size
    steps = sum(sizes) // 29
    keys = {**PAIRS, "data.train": f'"{tmp_path}/{{0..6}}.tar"', "global_batch_size": 29, "steps": steps}
    run = jobs.run(4, {**keys, "data.workers": 2}, observed=True)
    seen = [sample for ids in ids_of_steps(run).values() for sample in ids]
    assert sorted(seen) == list(range(sum(sizes)))  # 841 = 29 · 29


@pytest.mark.soak
def test_as_many_samples_as_a_batch_or_one_more_or_one_less(jobs: Jobs, tmp_path: Path) -> None:
    train = write_pairs(tmp_path / "17.tar", 17)
    keys = {**PAIRS, "data.train": train, "epochs": 3, "steps": "null"}
    less = jobs.start(2, {**keys, "global_batch_size": 18}).ends()
    assert set(less.codes) == {2} and less.out.count("error: ") == 1, less.out
    assert "global_batch_size=18 is more than the 17 samples" in less.out
    whole = jobs.run(2, {**keys, "global_batch_size": 17, "run.name": "whole"}, observed=True)
    assert ids_of_steps(whole) == {step: list(range(17)) for step in range(3)}
    more = ids_of_steps(jobs.run(2, {**keys, "global_batch_size": 16, "run.name": "more"}, observed=True))
    left_out = [set(range(17)) - set(ids) for ids in more.values()]
    assert len(left_out) == 3 and all(len(one) == 1 for one in left_out) and len(set.union(*left_out)) == 3


def alone(tiny: Callable[[dict[str, Any]], list[str]], before: list[str], **environment: str) -> str:
    """What `python -m train` says that ends well, in a process started by `before`."""
    command = [*before, sys.executable, "-m", *tiny({"run.name": "a"})]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_"))}
    ended = subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.soak
@pytest.mark.mounts
def test_no_network_no_home_and_no_temporary_folder(tiny, tmp_path: Path) -> None:
    nowhere = "/proc/no-such-folder"
    said = alone(tiny, ["unshare", "--net", "--map-root-user"], HOME=nowhere, TMPDIR=nowhere)
    assert "finished at step 6" in said and "Traceback" not in said
    assert state(tmp_path / "runs" / "a")["status"] == "finished"


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int calls;
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME && (++calls / 50) % 2) now->tv_sec -= 86400;
    return result;
}
"""


@pytest.mark.soak
@pytest.mark.compiler
def test_a_clock_that_jumps_a_day_back_and_forth(tiny, tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    shim = str(tmp_path / "clock.so")
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", "-o", shim, str(tmp_path / "clock.c"), "-ldl"], check=True)
    said = alone(tiny, [], LD_PRELOAD=shim)
    assert "finished at step 6" in said and len(losses(tmp_path / "runs" / "a")) == 6
