"""Four ranks on two machines read a checkpoint once a machine, and shards without an index once."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Forks, Jobs, Outcome, flip
from helpers.cli import Commands
from helpers.tiny_runs import SHARD, VAL, losses

from dyad.train.run_folder.digests import SETTLED

WORLD, OF_MACHINE = 4, 2
KEYS: dict[str, Any] = {"steps": 2, "checkpoint.every": 1}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of four shards without an index."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(4):
        shutil.copyfile(SHARD, folder / f"{number}.tar")
    return folder


def started(jobs: Jobs, keys: dict[str, Any], **environment: Any) -> Outcome:
    """A job of two machines that ran to its end."""
    (jobs.folder / "reads").mkdir(exist_ok=True)
    at = {"READS": str(jobs.folder / "reads"), "PER_MACHINE": str(OF_MACHINE), **environment}
    return jobs.start(WORLD, {**KEYS, **keys}, module="faults.reads", **at).ends(within=300)


def read(jobs: Jobs, folder: Path, pattern: str) -> list[dict[str, int]]:
    """By rank: name of a file of a folder → bytes."""
    notes = [json.loads((jobs.folder / "reads" / f"{rank}.json").read_text()) for rank in range(WORLD)]
    found = [{Path(path): count for path, count in note.items()} for note in notes]
    return [{p.name: count for p, count in of.items() if p.parent == folder and p.match(pattern)} for of in found]


def firsts(folder: Path, pattern: str) -> list[dict[str, int]]:
    """What `read` returns if the first rank of each machine, and no other, read each file of the folder once."""
    sizes = {path.name: path.stat().st_size for path in folder.glob(pattern) if path.name != "manifest.json"}
    return [{} if rank % OF_MACHINE else sizes for rank in range(WORLD)]


def test_two_machines_index_half_of_the_shards_each(jobs: Jobs, shards: Path) -> None:
    assert started(jobs, {"data.train": shards, "steps": 1}).codes == [0] * WORLD
    of_ranks, (whole, *_) = read(jobs, shards, "*.tar"), firsts(shards, "*.tar")
    assert of_ranks[0] == {name: whole[name] for name in ("0.tar", "2.tar")}
    assert of_ranks[OF_MACHINE] == {name: whole[name] for name in ("1.tar", "3.tar")}
    assert not any(counts for rank, counts in enumerate(of_ranks) if rank % OF_MACHINE)


def test_one_rank_of_a_machine_with_a_cache_of_its_own_indexes_all(jobs: Jobs, shards: Path, tmp_path: Path) -> None:
    (shards / ".index").symlink_to(tmp_path)  # nothing is written there, as on a disk that is read alone
    keys = {"data.train": shards, "steps": 1}
    assert started(jobs, keys, CACHES=str(tmp_path / "caches")).codes == [0] * WORLD
    assert read(jobs, shards, "*.tar") == firsts(shards, "*.tar")
    alone = jobs.run(1, {**KEYS, **keys, "run.name": "alone"})
    assert losses(jobs.folder / "runs/a") == pytest.approx(losses(alone), abs=1e-4)


def test_an_error_of_one_machine_that_indexes_ends_all(jobs: Jobs, shards: Path) -> None:
    (shards / "1.tar").unlink()
    (shards / "1.tar").mkdir()
    outcome = started(jobs, {"data.train": shards})
    assert outcome.codes == [3] * WORLD and not outcome.orphans
    assert outcome.out.count("error:") == 1 and "1.tar" in outcome.out, outcome.out


def test_a_checkpoint_is_hashed_once_a_machine(jobs: Jobs, commands: Commands) -> None:
    """When a run goes on, by python -m eval, and if the newest one is damaged: all ranks pass it over alike."""
    run = jobs.run(1, KEYS)
    older, newest = (run / "checkpoints" / f"step_{step:08d}" for step in (1, 2))
    time.sleep(SETTLED)  # until then a file may change without a new time stamp
    assert started(jobs, {"steps": 3}).codes == [0] * WORLD
    assert read(jobs, newest, "*") == firsts(newest, "*")
    whole = firsts(newest, "*")[0]
    shutil.rmtree(run / "checkpoints/step_00000003")

    at = {"READS": str(jobs.folder / "reads"), "PER_MACHINE": str(OF_MACHINE), "MODULE": "eval"}
    words = (f"run={run}", f"val={VAL}", f"out={jobs.folder / 'eval'}")
    job = Forks(run, commands.started(WORLD, "faults.reads", *words, coming=None, **at))
    assert job.ends(within=300).codes == [0] * WORLD
    weights = {name: size for name, size in whole.items() if not name.startswith("optimizer")}
    assert read(jobs, newest, "*") == [whole, {}, weights, {}]  # rank 0 has chosen it

    flip(newest / "optimizer.safetensors", -5)
    (run / "run_state.json").unlink()
    outcome = started(jobs, {"steps": 3})
    assert outcome.codes == [0] * WORLD and "going on at step 1 from" in outcome.out
    assert outcome.out.count("passing over a damaged checkpoint") == 1
    assert read(jobs, older, "*") == firsts(older, "*")
    assert not any(read(jobs, newest, "*")[1:])
