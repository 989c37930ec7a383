"""The same command again, or from a checkpoint: where it goes on, on how many processes, and what stays the same."""

import re
import shutil
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from harness import EPOCH, IMAGES, Jobs, digest, every_sample_once_an_epoch, ids_of_steps
from helpers.cli import Commands
from helpers.tiny_runs import QUIET, SHARD, VAL, losses, records, without_timings
from test_data import emoji
from test_detection import with_fault

from dyad.data.shards.shards import open_shards
from dyad.data.shards.sources import parse_sources
from dyad.train.run_folder.folder import steps


def stopped(jobs: Jobs, world: int, keys: dict[str, Any], step: int, first: int = 1) -> Path:
    """A start whose ranks are asked to stop before their step `step`, the last that they take. first: of its log."""
    job = jobs.start(world, keys, observed=True, STOP=f"SIGTERM@{step}")
    outcome = job.ends()
    assert outcome.codes == [75] * world and not outcome.orphans, outcome.out
    assert [record["step"] for record in records(job.run)] == list(range(first, step + 1))
    return job.run


def test_without_the_files_that_described_the_model(jobs: Jobs, models: Path, tmp_path: Path) -> None:
    given, file = models / "open_clip.json", tmp_path / "mine.json"
    whole = jobs.run(2, {"run.name": "whole", "model.text.name": shutil.copy(given, file)})
    keys = {"model.text.name": file, "checkpoint.every": 2}
    stopped(jobs, 2, keys, 3)
    file.unlink()
    assert digest(jobs.run(2, keys)) == digest(whole)


def test_sharded_towers_of_a_local_folder(jobs: Jobs, models: Path) -> None:
    """They begin with the weights of the folder, of which the run keeps none."""
    text = {"model.text.kind": "transformers", "model.text.name": models / "bert", "model.text.frozen": "false"}
    keys = {"dist.name": "fsdp2", **text, "checkpoint.every": 2, "model.batch_norm": "global"}
    whole = jobs.run(2, {**keys, "run.name": "whole"})
    stopped(jobs, 2, keys, 3)
    assert digest(jobs.run(2, keys)) == digest(whole)


@pytest.mark.soak
def test_from_the_middle_of_an_epoch_twice_from_one_checkpoint(jobs: Jobs) -> None:
    keys = {"steps": 20, "checkpoint.every": 7, "checkpoint.keep": 9, "data.workers": 1}
    run = jobs.run(2, keys)
    middle = run / "checkpoints" / "step_00000007"
    before = {path.name: path.read_bytes() for path in middle.iterdir()}
    for name in ("b", "c"):
        again = jobs.run(2, {**keys, "resume": middle, "run.name": name})
        assert digest(again) == digest(run)
        assert without_timings(again) == [r for r in without_timings(run) if r["step"] > 7]
    assert {path.name: path.read_bytes() for path in middle.iterdir()} == before


def test_on_other_numbers_of_processes_and_loader_workers_and_in_other_layouts(jobs: Jobs, tmp_path: Path) -> None:
    """Stopped in the first, second and third epoch, of three steps each."""
    keys = {**QUIET, "steps": 10, "data.train": emoji(tmp_path / "a.tar", samples=100)}
    one = jobs.run(1, {**keys, "run.name": "one"}, observed=True)
    hsdp, fsdp2 = {"dist.name": "hsdp", "dist.shard_size": 2}, {"dist.name": "fsdp2"}
    for world, workers, step, dist in ((2, 0, 2, {"chunk_size": 8}), (4, 0, 5, hsdp), (2, 2, 7, fsdp2)):
        run = stopped(jobs, world, {**keys, **dist, "data.workers": workers}, step)
    jobs.run(1, {**keys, "data.workers": 3}, observed=True)
    every_sample_once_an_epoch(run, 10, epoch=3)
    assert ids_of_steps(run) == ids_of_steps(one)
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)


def test_batches_of_one_source_on_one_and_two_processes(jobs: Jobs) -> None:
    """data.batches=by_source: stopped on two, gone on with on one, the ids and losses of one all along."""
    small = SHARD.parent / "fxemoji-unseen.tar"
    sources = f"[{SHARD},{{path: {small},weight: 2}}]"
    keys = {**QUIET, "steps": 10, "data.batches": "by_source", "data.shuffle": "full", "data.train": sources}
    one = jobs.run(1, {**keys, "run.name": "one"}, observed=True)
    run = stopped(jobs, 2, keys, 5)
    jobs.run(1, keys, observed=True)
    ids = ids_of_steps(run)
    assert ids == ids_of_steps(one)
    first = open_shards(parse_sources(str(SHARD))).sizes[0]
    of_small = [{i >= first for i in step} for step in ids.values()]
    assert all(len(owners) == 1 for owners in of_small) and {True} in of_small and {False} in of_small
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)
    outcome = jobs.start(1, {**keys, "data.batches": "mixed"}).ends()
    assert outcome.codes == [2] and "data.batches: by_source there, mixed now" in outcome.out


def test_two_views_of_images_on_one_and_two_processes(jobs: Jobs) -> None:
    """task=views, with a head whose batch norms see all ranks: stopped on two, gone on with on one."""
    keys = {**IMAGES, "steps": 4}
    one = jobs.run(1, {**keys, "run.name": "one"}, observed=True)
    run = stopped(jobs, 2, keys, 2)
    jobs.run(1, keys, observed=True)
    assert ids_of_steps(run) == ids_of_steps(one)
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.soak
def test_on_other_numbers_of_loader_workers_alone(jobs: Jobs) -> None:
    keys = {"steps": 30}
    undisturbed = jobs.run(2, {**keys, "run.name": "undisturbed"})
    for workers, step in ((0, 4), (2, 14)):
        stopped(jobs, 2, {**keys, "data.workers": workers}, step)
    run = jobs.run(2, {**keys, "data.workers": 3})
    assert digest(run) == digest(undisturbed)
    assert without_timings(run) == without_timings(undisturbed)


def test_a_run_that_begins_at_a_named_checkpoint_goes_on_like_any_other(jobs: Jobs) -> None:
    """In a folder of its own, and back in the run's own folder; also when keep has deleted the named checkpoint."""
    keys = {**QUIET, "steps": 6, "checkpoint.every": 2}
    run = jobs.run(1, {**keys, "checkpoint.keep": 9})
    undisturbed, middle = without_timings(run), run / "checkpoints" / "step_00000002"
    fork = {**keys, "checkpoint.keep": 1, "resume": middle, "run.name": "fork"}
    assert stopped(jobs, 1, fork, 5, first=3) == run.parent / "fork"
    again = jobs.start(1, fork).ends()
    assert again.codes == [0] and "going on at step 5" in again.out, again.out
    assert without_timings(run.parent / "fork") == [r for r in undisturbed if r["step"] > 2]

    back = {**keys, "checkpoint.keep": 1, "resume": middle}
    stopped(jobs, 1, back, 3)
    assert steps(run) == [3] and not middle.exists()
    (aside,) = run.glob("before-*")
    assert steps(aside) == [6, 4]
    stopped(jobs, 1, {**back, "resume": "auto"}, 5)
    last = jobs.start(1, back).ends()
    assert last.codes == [0] and "going on at step 5" in last.out, last.out
    assert without_timings(run) == undisturbed
    anew = jobs.start(1, {**keys, "resume": "never"}, observed=True, STOP="SIGTERM@2").ends()
    assert anew.codes == [75] and "the same command without resume=never goes on from there" in anew.out, anew.out


def test_a_refused_change_is_begun_in_a_folder_of_its_own_as_the_message_says(jobs: Jobs) -> None:
    """At the newest checkpoint, and as another run of W&B."""
    keys = {"steps": 1, "tracking.wandb": "offline"}
    run = jobs.run(1, keys)
    lower = {**keys, "steps": 2, "optim.lr": 1e-5}
    (refused,) = jobs.start(1, lower).ends().out.splitlines()[-1:]
    (words,) = re.findall(r"run.name=NEW (resume=\S+)", refused)
    branch = jobs.run(1, {**lower, "run.name": "lower", **dict([words.split("=", 1)])})
    assert [record["step"] for record in records(branch)] == [2]
    ids = [path.name.rpartition("-")[2] for each in (run, branch) for path in each.glob("wandb/offline-run-*")]
    assert len({*ids}) == len(ids) == 2


@pytest.mark.soak
def test_at_the_end_of_an_epoch(jobs: Jobs) -> None:
    keys = {"steps": 2 * EPOCH, "checkpoint.every": EPOCH}
    run = jobs.run(2, keys, observed=True)
    again = jobs.run(2, {**keys, "resume": run / "checkpoints" / f"step_{EPOCH:08d}", "run.name": "b"}, observed=True)
    assert [r["step"] for r in records(again)] == list(range(EPOCH + 1, 2 * EPOCH + 1))
    assert ids_of_steps(again) == {step: ids for step, ids in ids_of_steps(run).items() if step >= EPOCH}
    assert digest(again) == digest(run)
    every_sample_once_an_epoch(run, 2 * EPOCH)


def test_sharded_towers_go_on_after_a_killed_rank_and_are_used_by_one_process(jobs: Jobs, commands: Commands) -> None:
    keys = {"steps": 5, "checkpoint.every": 2, "dist.name": "fsdp2", "optim.ema": 0.5, "model.batch_norm": "global"}
    outcome = with_fault(jobs, 2, {**keys, "run.name": "killed"}, "killed@4", ON="1").ends()
    assert outcome.codes == [4, -SIGKILL] and not outcome.orphans, outcome
    killed, whole = (jobs.run(2, {**keys, "run.name": name}) for name in ("killed", "whole"))
    assert digest(killed) == digest(whole) and losses(killed) == losses(whole)
    assert not [path for path in (killed / "checkpoints").iterdir() if path.name.startswith(".")]
    used = commands.run("eval", f"checkpoint={killed}", f"suite=[retrieval:{VAL}]")
    assert used.code == 0, used.out
