"""Checkpoints that were damaged, that do not fit, that find no room; and two runs that want one folder."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
from harness import Jobs, checkpoints, cut, digest, flip, ids_of_steps, newest_whole, small_disk
from helpers.cli import Commands
from helpers.shards import index_shard
from helpers.tiny_runs import QUIET, SHARD, losses, records, refused, state, tiny_arguments
from safetensors.torch import load_file

from dyad.data.loading.order import Order
from dyad.train.run_folder.checkpoint import FORMAT
from dyad.train.run_folder.folder import steps

KEYS: dict[str, Any] = {**QUIET, "steps": 8, "checkpoint.every": 2, "checkpoint.keep": 4}
MORE = SHARD.with_name("noto-v1-trained.tar")


@pytest.fixture(scope="module")
def trained(commands: Commands, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with KEYS."""
    folder = tmp_path_factory.mktemp("trained")
    return Jobs(commands, partial(tiny_arguments, models, folder / "runs"), folder).run(1, KEYS)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, where `jobs` has runs named a."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "a"))


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, -5),
    "truncated": lambda path: cut(path, 5000),
    "missing": Path.unlink,
}


def test_a_checkpoint_is_damaged(jobs: Jobs, run: Path) -> None:
    """Each of the last three in another way: the run goes on from the one before them. One that is named is refused,
    damaged in any way: tests/train/run_folder/test_checkpoint.py."""
    before = digest(run)
    (run / "run_state.json").unlink()  # or it says that it is finished
    for step, harm in zip((4, 6, 8), DAMAGES.values(), strict=True):
        harm(folder(run, step) / "optimizer.safetensors")
    named = jobs.start(1, {**KEYS, "run.name": "other", "resume": folder(run, 4)}).ends()
    refused(named.ended, 3, folder(run, 4) / "optimizer.safetensors")
    again = jobs.start(1, KEYS).ends()
    assert again.codes == [0], again.out
    assert again.out.count("passing over a damaged checkpoint") == 3 and "going on at step 2 " in again.out
    (aside,) = run.glob("before-*")
    assert steps(aside) == [8, 6, 4] and f"put aside in {aside}" in again.out
    assert digest(run) == before and len(losses(run)) == 8


@pytest.mark.soak
def test_every_checkpoint_is_damaged(jobs: Jobs, run: Path) -> None:
    (run / "run_state.json").unlink()
    for step in checkpoints(run):
        (folder(run, step) / "manifest.json").unlink()
    refused(jobs.start(1, KEYS).ends().ended, 3, "4 checkpoints", "resume=never")
    refused(jobs.start(1, {**KEYS, "run.name": "b", "resume.mode": folder(run, 8)}).ends().ended, 3, "manifest.json")


def test_a_checkpoint_is_of_another_architecture_or_a_newer_program(jobs: Jobs, run: Path) -> None:
    wider = {**KEYS, "model.image.widths": [8, 8]}
    refused(jobs.start(1, wider).ends().ended, 2, "model.image.widths: [8,16] there, [8,8] now")
    elsewhere = jobs.start(1, {**wider, "run.name": "b", "resume": folder(run, 8)}).ends()
    refused(elsewhere.ended, 2, folder(run, 8))

    (run / "run_state.json").unlink()
    manifest = folder(run, 8) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": FORMAT + 1}))
    refused(jobs.start(1, KEYS).ends().ended, 2, f"format {FORMAT + 1}", FORMAT)


def test_two_runs_want_one_folder(jobs: Jobs) -> None:
    keys = {**KEYS, "steps": 100_000}
    first = jobs.start(1, keys)
    first.reaches(3)
    refused(jobs.start(1, keys).ends().ended, 2, f"process {first.ranks()[0]}", "run.name")
    first.signal(SIGKILL)
    first.ends()
    half = folder(first.run, 99_998).with_name(".step_00099998.partial")  # as of a killed save
    half.mkdir()
    second = jobs.start(1, keys)  # the lock died with its holder
    second.until(lambda: "going on at step" in second.said(), "going on")
    assert not half.exists()
    second.signal(SIGTERM)
    assert second.ends().codes == [75]


@pytest.mark.mounts
def test_the_disk_is_full_while_a_run_saves(jobs: Jobs, tmp_path: Path) -> None:
    """A run goes on without a checkpoint, and does not end without one. Without rights to mount, test_checkpoint.py
    has the same with a limit on the size of files."""
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        keys = {**KEYS, "steps": 100_000, "checkpoint.keep": 1, "run.dir": disk}
        job = jobs.start(1, keys)
        job.until(lambda: newest_whole(job.run) > 0, "a checkpoint")
        filler = disk / "filler"
        job.until(lambda: fill(filler) and "cannot write checkpoint" in job.said(), "a failed save")
        said = next(line for line in job.said().splitlines() if "cannot write checkpoint" in line)
        assert "No space left" in said and "bytes, " in said and "The run goes on; the next is due at step " in said
        full = "metrics.jsonl takes no more lines"
        job.until(lambda: fill(filler) and full in job.said(), "a line that finds no room")
        kept, gone_on = newest_whole(job.run), len(job.said().splitlines()) + 20
        job.until(lambda: len(job.said().splitlines()) > gone_on, "more steps")
        assert kept == newest_whole(job.run) > 0
        assert [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
        filler.unlink()
        job.until(lambda: newest_whole(job.run) > kept, "a checkpoint again")
        restored = "metrics.jsonl has all its lines again"  # said at the next line, maybe after the checkpoint
        job.until(lambda: restored in job.said(), "the lines that found no room")
        assert job.said().count(full) == job.said().count(restored) == 1
        failed = job.said().count("cannot write")
        job.until(lambda: fill(filler) and job.said().count("cannot write") > failed + 1, "failed saves again")
        kept = newest_whole(job.run)
        job.signal(SIGTERM)
        ended = job.ends()
        assert ended.codes == [4] and "error: cannot write checkpoint" in ended.out, ended.out
        assert kept == newest_whole(job.run) and not list((job.run / "checkpoints").glob(".*"))
        filler.unlink()
        again = jobs.start(1, keys)
        again.until(lambda: newest_whole(again.run) > kept, "it goes on")
        again.signal(SIGTERM)
        assert again.ends().codes == [75]
        assert len(losses(again.run)) == newest_whole(again.run) == state(again.run)["step"]


def test_the_run_folder_is_deleted_while_a_run_trains(jobs: Jobs) -> None:
    job = jobs.start(1, {**KEYS, "steps": 300, "checkpoint.every": 100})
    job.until(lambda: newest_whole(job.run) > 0, "a checkpoint")
    # the run may write into a folder that is being deleted
    job.until(lambda: shutil.rmtree(job.run, ignore_errors=True) or not job.run.exists(), "it is deleted")
    ended = job.ends()
    assert ended.codes == [0] and "config.yaml was deleted" in ended.out, ended.out
    assert len(losses(job.run)) == 300 and state(job.run)["status"] == "finished"
    assert {"config.yaml", "log.txt"} <= {path.name for path in job.run.iterdir()}


@pytest.mark.mounts
def test_the_disk_is_full_at_the_start(jobs: Jobs, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        keys = {**KEYS, "steps": 4, "run.dir": disk / "runs"}
        fill(disk / "filler")
        refused(jobs.start(1, keys).ends().ended, 4, "No space left on device")
        (disk / "filler").unlink()
        fill(disk / "filler", leave=200_000)  # for all but a checkpoint
        refused(jobs.start(1, keys).ends().ended, 4, disk / "runs" / "a", "run.dir")
        assert not (disk / "runs" / "a" / "checkpoints").exists()


def fill(path: Path, leave: int = 0) -> bool:
    """Take all the room there is but `leave` bytes. A save that fails makes room: do it again while one may."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
        file.truncate(file.tell() - leave)
    return True


def test_the_batch_is_another_one(jobs: Jobs, run: Path) -> None:
    larger = {**KEYS, "global_batch_size": 48, "steps": 7}
    allow = "resume.allow_batch_change=true"
    refused(jobs.start(1, larger).ends().ended, 2, "global_batch_size: 32 there, 48 now", allow)
    elsewhere = {**larger, "run.name": "b", "resume": folder(run, 8)}
    refused(jobs.start(1, elsewhere).ends().ended, 2, "global_batch_size=32", "48", allow)
    allowed = {**larger, "resume.allow_batch_change": "true"}
    refused(jobs.start(1, {**allowed, "steps": 5}).ends().ended, 2, "256 samples", "5 steps")
    assert checkpoints(run) == [2, 4, 6, 8] and len(losses(run)) == 8

    job = jobs.start(1, allowed, observed=True)
    ended = job.ends()
    assert ended.codes == [0] and "going on at step 5 " in ended.out and "256 samples" in ended.out, ended.out
    assert [r["step"] for r in records(run)] == [6, 7] and records(run)[0]["samples_seen"] == 6 * 48
    order = Order([index_shard(str(SHARD)).samples], [1.0], seed=0, global_batch_size=48)
    assert ids_of_steps(run) == {step: order.ids(step).tolist() for step in (5, 6)}
    asides = sorted(run.glob("before-*"))
    assert all(f"put aside in {aside}" in ended.out for aside in asides) and len(asides) == 2
    assert [len(losses(aside)) for aside in asides if (aside / "metrics.jsonl").exists()] == [8]
    assert [step for aside in asides for step in checkpoints(aside)] == [2, 4, 6, 8]
    assert checkpoints(run) == [5, 6, 7]

    weights = digest(run)
    for step in (6, 7):
        shutil.rmtree(folder(run, step))
    left = next(aside for aside in asides if (aside / "checkpoints").exists())
    shutil.move(folder(left, 8), folder(run, 8))  # as if killed while those of the old count were put aside
    again = jobs.start(1, allowed).ends()
    assert again.codes == [0] and "going on at step 5 " in again.out, again.out
    assert digest(run) == weights and checkpoints(run) == [5, 6, 7]
    assert jobs.start(1, larger).ends().out.startswith("already finished")  # it is a run of 48 now


def test_the_data_are_others(jobs: Jobs, tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("1.tar", "2.tar"))
    shutil.copy(SHARD, first)
    shutil.copy(MORE, second)
    old = {**KEYS, "steps": 4, "data.train": first, "objective": "isogclr", "objective.rho": 1.0}
    run = jobs.run(1, old)
    remembered = load_file(folder(run, 4) / "memory.safetensors")
    (run / "run_state.json").unlink()

    more = {**old, "data.train": f"{first}::{second}", "steps": 5}
    refused(jobs.start(1, more).ends().ended, 2, "data.train", "resume.allow_more_data=true")
    samples = index_shard(str(second)).samples
    elsewhere = {**more, "run.name": "b", "resume": folder(run, 4)}
    refused(jobs.start(1, elsewhere).ends().ended, 2, f"{samples:,} samples", "resume.allow_more_data=true")
    allowed = {**more, "resume.allow_more_data": "true"}
    before = {**allowed, "data.train": f"{second}::{first}"}
    refused(jobs.start(1, before).ends().ended, 2, "data.train", "1.tar", "2.tar")

    assert jobs.run(1, allowed, observed=True) == run
    sizes = [index_shard(str(path)).samples for path in (first, second)]
    order = Order(sizes, [1.0, 1.0], seed=0, global_batch_size=32)
    assert ids_of_steps(run) == {4: order.ids(4).tolist()} and len(losses(run)) == 5
    now = load_file(folder(run, 5) / "memory.safetensors")
    unseen = [sample for sample in range(sizes[0]) if sample not in ids_of_steps(run)[4]]
    assert len(now["log_u_x"]) == sum(sizes)
    assert now["log_u_x"][unseen].numpy().tobytes() == remembered["log_u_x"][unseen].numpy().tobytes()
    assert now["never_visited"] == now["log_u_x"].isnan().sum() > remembered["never_visited"]

    (tmp_path / "moved").mkdir()
    moved = shutil.copy(first, tmp_path / "moved")
    assert jobs.run(1, {**allowed, "data.train": f"{moved}@2::{second}", "steps": 6}) == run

    allowed["data.train"] = f"{moved}@2::{second}"
    shutil.copy(MORE, moved)
    refused(jobs.start(1, allowed).ends().ended, 2, "data.train", "1.tar")
