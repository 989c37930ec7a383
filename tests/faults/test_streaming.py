"""Faults of data.mode=stream: kills, damage, storage that is a plain web server or goes away."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from harness import Jobs, cut, newest_whole
from helpers.shards import image, write_tar
from helpers.tiny_runs import losses

SHARDS, SIZE = 6, 24
KEYS = {
    "data": "image_text",
    "data.captions": "[caption]",
    "data.mode": "stream",
    "data.buffer": 20,
    "data.workers": 1,
    "global_batch_size": 8,
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of SHARDS shards with SIZE samples each, whose field id counts through all."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        write_tar(
            folder / f"{shard}.tar",
            [
                member
                for n in range(shard * SIZE, (shard + 1) * SIZE)
                for member in (
                    (f"{n:04d}.png", image(n)),
                    (f"{n:04d}.json", json.dumps({"id": n, "caption": f"number {n}"}).encode()),
                )
            ],
        )
    return folder


def ids(folder: Path, last_step: int) -> list[int]:
    """The samples of the steps before `last_step` that a job noted there, of all ranks."""
    notes = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return [sample for note in notes if note["step"] < last_step for sample in note["ids"]]


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def streamed(run: Path) -> Mapping[str, Any]:
    return json.loads(max((run / "checkpoints").glob("step_*/state.json")).read_text())["stream"]


@pytest.mark.parametrize(("world", "workers"), [(2, 1), (1, 2)])
def test_a_stream_is_killed_and_loses_nothing(
    jobs: Jobs, shards: Path, tmp_path: Path, world: int, workers: int
) -> None:
    """What comes again is what it says, whether or not as many processes go on."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    keys = {**KEYS, "data.train": shards, "data.id_key": "id", "steps": 60, "checkpoint.every": 5}
    job = jobs.start(2, keys, IDS=str(before))
    job.until(lambda: newest_whole(job.run) >= 10, "a checkpoint at step 10")
    job.kill()
    step = newest_whole(job.run)
    again = jobs.start(world, {**keys, "data.workers": workers}, IDS=str(after))
    outcome = again.ends()
    assert outcome.codes == [0] * world and not outcome.orphans, outcome.out

    taken = [*ids(before, step), *ids(after, 60)]
    assert len(taken) == 60 * 8 == len(losses(job.run)) * 8
    state = streamed(job.run)
    assert state["first"] >= SHARDS and set(taken) == set(range(SHARDS * SIZE))
    beyond = SIZE * (state["first"] - SHARDS + len(state["through"])) + sum(count for _, count in state["taken"])
    repeated = len(taken) - SHARDS * SIZE - beyond
    assert repeated > 0 and f"{repeated} samples come again, none is left out" in outcome.out, outcome.out


def test_a_shard_of_a_stream_is_cut(jobs: Jobs, shards: Path) -> None:
    broken = shards / "2.tar"
    cut(broken, 10_000)
    outcome = (job := jobs.start(2, {**KEYS, "data.train": shards, "steps": 25})).ends()
    run, lines = job.run, ledger(job.run)
    assert lines and {line["shard"] for line in lines} == {str(broken)} and len(losses(run)) == 25
    assert outcome.codes == [0, 0] and "it was cut; what is there and all that follows are left out" in outcome.out
    assert all(f"step {line['step']}: {broken}: offset" in outcome.out for line in lines)
    assert all(line["reason"] in outcome.out for line in lines)


def test_all_shards_of_a_stream_go_away(jobs: Jobs, shards: Path) -> None:
    job = jobs.start(2, {**KEYS, "data.train": shards, "steps": 10_000})
    job.reaches(3)
    for shard in shards.iterdir():
        shard.unlink()
    outcome = job.ends(within=60)
    assert 3 in outcome.codes and not outcome.orphans
    assert "shards in a row gave no sample" in outcome.out and "Traceback" not in outcome.out, outcome.out


@pytest.fixture
def served(shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder by a web server that knows no ranges."""
    monkeypatch.setenv("no_proxy", "*")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(shards))) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_knows_no_ranges_and_lacks_a_shard(jobs: Jobs, shards: Path, served: str) -> None:
    (shards / "1.tar").unlink()
    run = jobs.run(2, {**KEYS, "data.train": f'"{served}/{{0..5}}.tar"', "steps": 25})
    assert len(losses(run)) == 25
    assert {line["reason"] for line in ledger(run)} == {
        f"{served}/1.tar: offset 0: cannot be read: the server says 404 File not found"
    }


@pytest.mark.soak
def test_numbers_from_a_field_serve_objectives_with_state(jobs: Jobs, shards: Path) -> None:
    keys = {"objective": "sogclr", "data.id_key": "id", "objective.num_samples": SHARDS * SIZE, "steps": 4}
    assert len(losses(jobs.run(1, {**KEYS, "data.train": shards, **keys}))) == 4
