"""Going on: what became of the data, at no cost that grows with the position, with state for new samples."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.messages import raises
from helpers.rows import dpr_row, write_beir, write_lines

import dyad.data.loading.order
from dyad.data.base.errors import ConfigError
from dyad.data.batch import Batch
from dyad.data.config import DataConfig
from dyad.data.loading.loader import build_loader
from dyad.data.loading.order import Order
from dyad.data.question_passage.questions import open_questions
from dyad.data.shards.manifest import BLOCKS, Changes, FileEntry, Manifest, changes, summary
from dyad.run.resume import _more_samples
from dyad.train.cli.compose import compose_config
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.training_data import DATA


def files(count: int, samples: int = 10) -> list[FileEntry]:
    return [FileEntry(f"{number:05d}.tar", 1000 + number, samples, f"{number:064x}") for number in range(count)]


@pytest.mark.parametrize("count", [1, BLOCKS, BLOCKS + 1, 10_000])
def test_the_same_files_and_more_behind_them(count: int) -> None:
    before = summary({"data.train": files(count)})
    assert len(json.dumps(before)) < 8000
    assert changes(before, {"data.train": files(count)}) == Changes({}, {})
    assert changes(before, {"data.train": files(count + 3)}) == Changes({}, {"data.train": 30})


@pytest.mark.parametrize("count", [5, 10_000])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_any_other_change_is_named(count: int, place: int) -> None:
    before, now = summary({"data.train": files(count)}), files(count)
    for change in (
        [*now[:place], FileEntry("x.tar", 1, 2, "0"), *now[place:][1:]],  # another file
        [*now[:place], FileEntry(now[place].name, now[place].size, 10, "0"), *now[place:][1:]],  # another content
        [*now[:place], *now[place:][1:]],  # one less
        [FileEntry("x.tar", 1, 2, "0"), *now],  # one before
    ):
        found = changes(before, {"data.train": change})
        assert list(found.different) == ["data.train"] and not found.added


def test_the_words_say_which_file_and_what_of_it() -> None:
    before, (first, second) = summary({"data.train": files(2)}), files(2)

    def said(*now: FileEntry) -> str:
        return changes(before, {"data.train": now}).different["data.train"]

    there = "00001.tar with 10 samples in 1,001 bytes there, "
    assert said(first, FileEntry("b.tar", 7, 1234, "b")) == there + "b.tar with 1,234 samples in 7 bytes now"
    other = FileEntry(second.name, second.size, second.samples, "b")
    assert said(first, other) == there + "00001.tar with 10 samples in 1,001 bytes, of other content now"
    assert said(first) == there + "nothing now"
    many = changes(summary({"a": files(64)}), {"a": files(7)}).different["a"]
    assert many.startswith("files 7 to 8, from 00006.tar on, with 20 samples in ")
    assert changes({}, {"b": files(1)}) == Changes({}, {"b": 10})
    assert changes(summary({"b": files(1)}), {}).different["b"].endswith("nothing now")


def test_questions_are_named_by_their_files_and_judgements(tmp_path: Path) -> None:
    first, second = (write_lines(tmp_path / f"{name}.jsonl", [dpr_row(0, hard=0)] * 3) for name in "ab")
    folder = write_beir(tmp_path / "set")

    def manifest(*paths: Path) -> Manifest:
        return {"data.train": open_questions([str(path) for path in paths], DataConfig()).files}

    before = summary(manifest(first, folder))
    assert changes(before, manifest(first, folder, second)) == Changes({}, {"data.train": 3})
    assert changes(before, manifest(folder, first)).different["data.train"].startswith("a.jsonl with 3 samples in ")
    judgements = folder / "qrels" / "train.tsv"
    judgements.write_text("".join(judgements.read_text().splitlines(keepends=True)[:-1]))
    assert changes(before, manifest(first, folder)).different["data.train"].startswith("set/qrels/train.tsv with ")


class Ids:
    """Batches of sample ids alone."""

    def __getitems__(self, positions: Sequence[tuple[int, int]]) -> Batch:
        ids = torch.tensor([sample for _, sample in positions])
        return Batch(ids, ids, ids, ids, ids)

    def where(self, sample_id: int) -> str:
        return str(sample_id)


def test_the_first_batch_costs_the_same_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    feistel = dyad.data.loading.order._feistel
    monkeypatch.setattr(
        dyad.data.loading.order,
        "_feistel",
        lambda value, *more: (computed.append(len(value)), feistel(value, *more))[1],
    )
    order = Order([100_000] * 100, [1.0] * 100, seed=0, global_batch_size=4096)
    for share in (0.01, 0.99):
        computed.clear()
        step = int(share * order.steps_per_epoch)
        loader = build_loader(
            Ids(), order, rank=0, world_size=1, first_step=step, last_step=order.steps_per_epoch, workers=0
        )
        batch = next(iter(loader))
        assert batch.sample_ids.tolist() == order.ids(step).tolist()
        assert 0 < sum(computed) < 20 * order.global_batch_size  # twice: for the loader and for the line above


@pytest.mark.parametrize("initial", [{"u": float("nan"), "tau": 0.5}, {"tau": 0.5}], ids=["visits", "constants"])
def test_new_samples_are_as_before_their_first_visit(initial: dict[str, float]) -> None:
    old, new = SampleState(5, initial), SampleState(8, initial)
    whole = {**old.gathered(torch.device("cpu")), "tau": torch.arange(5.0)}
    new.load(whole, more_samples=True)
    now = new.gathered(torch.device("cpu"))
    assert now["tau"].tolist() == [0, 1, 2, 3, 4, 0.5, 0.5, 0.5]
    assert now["never_visited"] == (8 if "u" in initial else 0)


def test_frames_of_other_values_are_other_data(tmp_path: Path) -> None:
    """Fingerprints of older versions are without the values: such a run goes on if its files are the same."""
    words = ["task=sequence", "objective=cpc", "data.items=frames", f"data.train={tmp_path}", "global_batch_size=2"]
    config = compose_config(words)

    def opened() -> Any:
        return SimpleNamespace(data=DATA[config.task][config.data.items](config, None))

    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((4, 2), np.float32))
    data = opened().data
    state = {"data": summary(data.manifest), "data_fingerprint": data.fingerprint}
    states = [state, {**state, "data_fingerprint": "older"}]
    assert [_more_samples(tmp_path, each, opened(), config) for each in states] == [0, 0]
    np.save(tmp_path / "b.npy", np.ones((4, 2), np.float32))
    for each in states:
        with raises(ConfigError, tmp_path, "data.train: b.npy", "of other content"):
            _more_samples(tmp_path, each, opened(), config)
