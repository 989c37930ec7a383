"""Damaged samples, shards that change or go away, loader processes that are lost."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any

import psutil
import pytest
from harness import Job, Jobs, Outcome, flip, ids_of_steps, newest_whole
from helpers.cli import Commands
from helpers.data_cli import code_of
from helpers.shards import BLOCK, Member, headers_of, index_shard, overwrite, write_tar
from helpers.tiny_runs import SHARD, VAL, last_weights, losses, records, state
from helpers.topics import arguments, write_topics
from PIL import Image

NOT_A_IMAGE = b"\x89PNG\r\n\x1a\n but no more"
SAMPLES = 400


def members_of(shard: Path) -> list[list[Member]]:
    """Of each sample of a shard, its members."""
    samples: dict[str, list[Member]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            samples.setdefault(member.name.partition(".")[0], []).append((member.name, file.read()))
    return list(samples.values())


def emoji(path: Path, bad: Iterable[int] = (), samples: int = SAMPLES) -> Path:
    """A shard of so many emoji; the images of some of them cannot be decoded."""
    found = members_of(SHARD)[:samples]
    for number in bad:
        found[number] = [(n, c if n.endswith("json") else NOT_A_IMAGE) for n, c in found[number]]
    return write_tar(path, [member for sample in found for member in sample])


def ledger(run: Path) -> list[dict[str, Any]]:
    path = run / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def substituted(run: Path) -> dict[float, float]:
    """Step → the total that was logged there."""
    return {r["step"]: r["train/substituted"] for r in records(run) if "train/loss" in r}


def told(outcome: Outcome, code: int, *words: str) -> None:
    """All ranks left with this code, and one of them said why, in one message."""
    assert set(outcome.codes) == {code} and not outcome.orphans, (outcome.codes, outcome.orphans, outcome.out)
    assert outcome.out.count("error:") == 1 and "Traceback" not in outcome.out, outcome.out
    assert all(word in outcome.out for word in words), outcome.out


# Samples that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.soak
def test_one_percent_of_the_images_cannot_be_decoded(jobs: Jobs, tmp_path: Path) -> None:
    """The same samples take their places at any number of ranks and workers, also when the run is stopped between."""
    bad = {7, 100, 205, 399}
    keys = {"data.train": emoji(tmp_path / "a.tar", bad), "steps": 24, "checkpoint.every": 10, "tracking.every": 4}
    one = jobs.run(1, {**keys, "run.name": "one"}, observed=True)
    lines = ledger(one)
    assert {line["id"] for line in lines} <= bad and {line["by"] for line in lines}.isdisjoint(bad)
    assert all(line["kind"] == "substitute" and "no sound JPEG, PNG or WebP" in line["reason"] for line in lines)
    assert {step: sum(line["step"] <= step for line in lines) for step in range(4, 25, 4)} == substituted(one)
    assert len(lines) > 4 and len(ids_of_steps(one)) == 24
    assert all(len(ids) == 32 and bad.isdisjoint(ids) for ids in ids_of_steps(one).values())

    three = jobs.run(3, {**keys, "run.name": "three", "data.workers": 2}, observed=True)
    assert ids_of_steps(three) == ids_of_steps(one)
    assert (three / "ledger.jsonl").read_bytes() == (one / "ledger.jsonl").read_bytes()
    assert substituted(three) == substituted(one) and losses_at(three) == pytest.approx(losses_at(one), rel=1e-5)

    job = jobs.start(1, {**keys, "run.name": "stopped", "data.workers": 1, "tracking.every": 1})
    job.reaches(11)
    job.signal(SIGKILL)
    job.ends()
    stopped = jobs.run(1, {**keys, "run.name": "stopped"})
    assert last_weights(stopped) == last_weights(one)
    assert (stopped / "ledger.jsonl").read_bytes() == (one / "ledger.jsonl").read_bytes()


def losses_at(run: Path) -> list[float]:
    return [r["train/loss"] for r in records(run) if "train/loss" in r]


def test_thirty_percent_of_the_images_cannot_be_decoded(jobs: Jobs, tmp_path: Path) -> None:
    bad = random.Random(1).sample(range(SAMPLES), SAMPLES * 3 // 10)
    keys = {"data.train": emoji(tmp_path / "a.tar", bad), "steps": 20, "tracking.every": 5, "checkpoint.every": 10}
    job = jobs.start(2, keys)
    told(job.ends(), 3, "101 of the last", "data.bad_share=0.01 (100 of 10,000)", "ledger.jsonl")
    lines = ledger(job.run)
    assert len(lines) > 100 and lines[-1]["step"] <= 20 and state(job.run)["status"] == "failed"
    again = jobs.start(1, {**keys, "data.bad_share": 1})  # the same command goes on when that is allowed
    outcome, count = again.ends(), len(ledger(job.run))
    assert outcome.codes == [0] and len(losses_at(job.run)) == 5 and substituted(job.run)[20] == count > 150
    line = f"{count} samples could not be used, others took their place: {job.run / 'ledger.jsonl'}"
    assert line in outcome.out.splitlines()


def test_a_hundred_bad_samples_in_a_row(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(1, {"data.train": emoji(tmp_path / "a.tar", range(8, SAMPLES)), "steps": 10})
    told(job.ends(), 3, "samples in a row cannot be used", "data.bad_in_a_row", "a.tar: sample '", "no sound JPEG")


def test_no_sample_can_be_used(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.start(1, {"data.train": emoji(tmp_path / "a.tar", range(SAMPLES))})
    told(job.ends(), 3, "a.tar: sample '", "no sound JPEG")
    assert not job.run.exists()


def test_the_first_bad_sample_stops_the_run_when_that_is_asked_for(jobs: Jobs, tmp_path: Path) -> None:
    keys = {"data.train": emoji(tmp_path / "a.tar", range(2, SAMPLES, 20)), "data.bad_samples": "stop"}
    job = jobs.start(2, {**keys, "data.workers": 1})
    told(job.ends(), 3, "a.tar: sample '", "no sound JPEG")
    assert not ledger(job.run) and state(job.run)["status"] == "failed"


def test_a_very_long_image_is_an_image_like_any_other(jobs: Jobs, tmp_path: Path) -> None:
    """In training and evaluation, whose shorter side would be brought to size with 224,000,000 pixels beside it."""
    found = members_of(SHARD)[:32]
    thin = io.BytesIO()
    Image.new("1", (1_000_000, 1)).save(thin, "PNG")
    found[7] = [(n, c if n.endswith("json") else thin.getvalue()) for n, c in found[7]]
    shard = write_tar(tmp_path / "a.tar", [member for sample in found for member in sample])
    keys = {"data.train": shard, "data.val": shard, "steps": 1, "data.workers": 1, "model.image.image_size": 224}
    assert not ledger(jobs.run(1, keys))


def test_an_evaluation_stops_at_a_bad_sample_and_goes_on_when_it_is_mended(jobs: Jobs, tmp_path: Path) -> None:
    """The training is not lost: the last step is saved before its evaluation."""
    keys = {"data.val": emoji(tmp_path / "a.tar", [60], 64), "steps": 1, "data.workers": 1}
    job = jobs.start(2, keys)
    told(job.ends(), 3, "a.tar: sample '", "no sound JPEG")
    assert newest_whole(job.run) == 1 and len(losses(job.run)) == 1
    emoji(tmp_path / "a.tar", samples=64)
    jobs.run(2, keys)
    assert len(losses(job.run)) == 1 and [r for r in records(job.run) if any(k.startswith("val/") for k in r)]


# Damage that comes after the index was made --------------------------------------------------------------------------


def test_a_sample_is_damaged_after_it_was_indexed(jobs: Jobs, tmp_path: Path) -> None:
    """Found at the read by its CRC32, and replaced: never an image with another one's caption, never one less."""
    shard, bad = emoji(tmp_path / "a.tar", samples=96), {5, 30, 55, 80}
    before = jobs.run(1, {"data.train": shard, "run.name": "before", "steps": 3}, observed=True)
    for sample in bad:
        flip(shard, headers_of(shard)[2 * sample] + BLOCK + 40)
    after = jobs.run(2, {"data.train": shard, "run.name": "after", "steps": 3}, observed=True)
    lines = ledger(after)
    assert {line["id"] for line in lines} == bad and not ledger(before)
    assert all(f"offset {headers_of(shard)[2 * line['id']] + BLOCK}: its CRC32" in line["reason"] for line in lines)
    replaced = {(line["step"] - 1, line["id"]): line["by"] for line in lines}
    for step, ids in ids_of_steps(before).items():
        assert ids_of_steps(after)[step] == sorted(replaced.get((step, i), i) for i in ids)


@pytest.mark.soak
def test_rows_and_passages_are_damaged_after_they_were_indexed(
    commands: Commands, models: Path, tmp_path: Path
) -> None:
    """Of the other task: the question's row, or a passage that it names, is damaged: another row stands there."""
    topics = write_topics(tmp_path / "topics")
    runs = {"run.dir": tmp_path / "runs", "data.bad_share": 1, "steps": 12}
    first = commands.run(*arguments(models / "bert", topics, tmp_path / "runs", {**runs, "run.name": "before"}))
    assert first.code == 0 and not ledger(tmp_path / "runs" / "before"), first.out
    queries, corpus = topics / "queries.jsonl", topics / "corpus.jsonl"
    flip(queries, queries.read_bytes().index(b'"t5"') + 1)
    for passage in range(8):
        flip(corpus, corpus.read_bytes().index(b'"p9-%d"' % passage) + 1)
    whole = []
    for size, name in ((1, "one"), (2, "two")):
        keys = {**runs, "run.name": name, "data.workers": size - 1}
        ended = commands.world(size, *arguments(models / "bert", topics, tmp_path / "runs", keys))
        assert [e.code for e in ended] == [0] * size, ended
        whole.append((tmp_path / "runs" / name / "ledger.jsonl").read_bytes())
    assert whole[0] == whole[1]
    lines = ledger(tmp_path / "runs" / "two")
    assert {line["id"] for line in lines} == {5, 9}
    reasons = {line["id"]: line["reason"] for line in lines}
    assert "queries.jsonl" in reasons[5] and "corpus.jsonl" in reasons[9]
    assert len(losses(tmp_path / "runs" / "two")) == 12


def test_a_shard_is_changed_while_it_is_read(jobs: Jobs, tmp_path: Path) -> None:
    """In place, under the open files of the run, by the same samples in another order."""
    shard = emoji(tmp_path / "a.tar")
    job = jobs.start(1, {"data.train": shard, "steps": 100_000, "data.workers": 1})
    job.reaches(3)
    other = write_tar(tmp_path / "b.tar", [member for sample in members_of(shard)[::-1] for member in sample])
    shard.write_bytes(other.read_bytes())
    told(job.ends(), 3, f"shard {shard} has changed since it was indexed")
    assert not ledger(job.run)


def test_shards_are_touched_while_they_are_read(jobs: Jobs, tmp_path: Path) -> None:
    """As a backup or a copy does. The evaluation opens its shard anew; content decides, and so it does for a change."""
    shard = emoji(tmp_path / "a.tar")
    val = write_tar(tmp_path / "val.tar", [member for sample in members_of(VAL)[:40] for member in sample])
    keys = {"data.train": shard, "data.val": val, "eval.every": 4, "eval.block": 16, "data.workers": 1}
    job = jobs.start(1, {**keys, "steps": 100_000})
    job.reaches(2)
    for path in (shard, val):
        os.utime(path)
    job.reaches(len(records(job.run)) + 10)  # with two evaluations
    flip(val, headers_of(val)[4] + BLOCK + 40)
    os.utime(val)
    told(job.ends(), 3, f"shard {val} has changed since it was indexed")


@pytest.mark.soak
def test_a_shard_is_deleted_while_it_is_read(jobs: Jobs, tmp_path: Path) -> None:
    """Files that are open stay; the next start says what is missing."""
    shard = emoji(tmp_path / "a.tar")
    keys = {"data.train": shard, "steps": 100_000, "data.workers": 1, "checkpoint.every": 5}
    job = jobs.start(2, keys)
    job.reaches(3)
    shard.unlink()
    job.reaches(SAMPLES // 32 + 5)
    job.signal(SIGTERM)
    assert job.ends().codes == [75, 75]
    told(jobs.start(1, keys).ends(), 2, "a.tar")


# Shards that webdataset would read less of ---------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "cut_in_a_payload": lambda path, at: os.truncate(path, at + BLOCK + 5),
    "cut_in_a_header": lambda path, at: os.truncate(path, at + 100),
    "cut_between_members": os.truncate,
    "a_block_of_zeros": lambda path, at: overwrite(path, at, bytes(BLOCK)),
    "a_random_header": lambda path, at: overwrite(path, at, random.Random(1).randbytes(BLOCK)),
}


def test_damaged_shards_are_reported_and_refused(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `data index` and `data check` with shard and offset; training does not begin. Also one with a key twice."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, damage in DAMAGE.items():
        shard = emoji(folder / f"{name}.tar", samples=40)
        at = headers_of(shard)[40]
        damage(shard, at)
        for verb in ("index", "check"):
            assert code_of(monkeypatch, verb, shard) == 3
            printed = capsys.readouterr()
            assert f"{shard}: offset {at}: " in printed.out and "1 of 1 shards are broken" in printed.err
    samples = members_of(SHARD)[:40]
    twice = write_tar(folder / "0.tar", [m for sample in [*samples, samples[3]] for m in sample])
    (problem,) = index_shard(str(twice)).problems
    assert f"key '{samples[3][0][0].partition('.')[0]}' again" in problem.message
    job = jobs.start(1, {"data.train": folder})
    told(job.ends(), 3, "6 of 6 shards are broken", f"{twice}: offset ", "again, first at offset")
    assert not job.run.exists()


def test_a_key_twice_in_two_shards(jobs: Jobs, tmp_path: Path) -> None:
    """Two samples with ids of their own; in one shard that is damage."""
    samples = members_of(SHARD)[:40]
    first, second = (write_tar(tmp_path / n, [m for s in samples for m in s]) for n in ("b.tar", "c.tar"))
    keys = {"data.train": f"{first}::{second}", "global_batch_size": 80, "steps": 1}
    assert ids_of_steps(jobs.run(1, keys, observed=True)) == {0: list(range(80))}


# Loader processes that are lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "fault"), [(2, SIGKILL), (1, SIGSTOP), pytest.param(2, SIGSTOP, marks=pytest.mark.soak)]
)
def test_a_loader_process_is_lost(jobs: Jobs, world: int, fault: Signals) -> None:
    """All ranks end, the process is named; it is neither waited for nor left behind."""
    job = jobs.start(world, {"steps": 100_000, "data.workers": 2, "data.timeout": 5, "checkpoint.every": 5})
    job.reaches(7)
    lost = loaders(job)[0]
    os.kill(lost, fault)
    outcome = job.ends(within=60)
    how = "was killed by SIGKILL" if fault is SIGKILL else "is stopped by a signal: nothing came for 5 s"
    told(outcome, 4, f"rank {world - 1}: loader worker 0 (process {lost}, at sample ", f"of {SHARD}) {how}")
    assert state(job.run)["error"].count(f"rank {world - 1}: ") == 1  # as rank 0 writes it


@pytest.mark.soak
@pytest.mark.parametrize("fault", [SIGKILL, SIGSTOP])
def test_a_loader_process_of_an_evaluation_is_lost(jobs: Jobs, fault: Signals) -> None:
    keys = {"steps": 100_000, "eval.every": 1, "eval.block": 1, "data.val": VAL}
    job = jobs.start(2, {**keys, "data.workers": 1, "data.timeout": 5})
    lost: list[int] = []

    def one_is_missed() -> bool:
        """One that has handed over its last block is not."""
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            for pid in set(loaders(job)[1:]).difference(lost):
                os.kill(pid, fault)
                lost.append(pid)
        return "error:" in job.said()

    job.until(one_is_missed, "an error")
    outcome = job.ends(within=60)
    told(outcome, 4, "rank 1: loader worker 0 (process ")
    assert any(f"(process {pid}" in outcome.out for pid in lost), outcome.out


def loaders(job: Job) -> list[int]:
    """Loader processes of the last rank, in the order of their start: first those of the training."""
    found = psutil.Process(job.ranks()[-1]).children()
    return [child.pid for child in sorted(found, key=lambda child: child.create_time())]
