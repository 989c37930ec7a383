"""A file of log q by content key, before a run begins: of its data, of other data, without some of its items."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_bert
from helpers.data_cli import here
from helpers.messages import raises
from helpers.rows import dpr_row, write_lines

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.log_weights import read_log_weights, write_log_weights
from dyad.data.shards.manifest import changes, summary
from dyad.run.checks import check_config
from dyad.run.item_weights import check_item_weights
from dyad.train.cli.compose import compose_config
from dyad.train.losses import build_objective
from dyad.train.towers.build import build_model
from dyad.training_data import TrainingData, build_data, with_item_numbers


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return folder


def words(bert: Path, train: Path, negatives: int, *others: str) -> list[str]:
    return [
        *("experiment=mnrl", f"model.text.name={bert}", f"data.train={train}", "global_batch_size=8"),
        *(f"data.negatives.per_row={negatives}", *others),
    ]


def opened(bert: Path, train: Path, negatives: int = 0) -> TrainingData:
    config = compose_config(words(bert, train, negatives))
    return build_data(config, build_model(config))


def notes(path: Path, data: TrainingData, samples: int = 20) -> list[str]:
    objective = build_objective("one_sided_dpm", importance="log_q", importance_file=str(path))
    return check_item_weights(objective, data.dataset, samples, data.manifest)


def test_a_file_is_compared_with_the_data_of_the_run(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", (dpr_row(i) for i in range(20)))
    fewer = write_lines(tmp_path / "fewer.jsonl", (dpr_row(i) for i in range(10)))
    other = write_lines(tmp_path / "other.jsonl", (dpr_row(i) for i in range(90, 110)))
    positives, every = tmp_path / "positives.safetensors", tmp_path / "every.safetensors"
    here(monkeypatch, "weights", str(rows), f"out={positives}")
    here(monkeypatch, "weights", str(rows), f"out={every}", "add=1")
    assert notes(positives, opened(bert, rows)) == notes(every, opened(bert, rows, 2)) == []
    (note,) = notes(positives, opened(bert, fewer), 10)
    assert str(positives) in note and "rows.jsonl with 20 samples" in note and "fewer.jsonl with 10 samples" in note
    for data in (opened(bert, other), opened(bert, rows, negatives=2)):
        with raises(DataError, positives, "add=1"):
            notes(positives, data)
    own = replace(read_log_weights(str(positives)), path=str(tmp_path / "own.safetensors"), facts={})
    write_log_weights(own)  # a user's own file says nothing of its data
    assert notes(Path(own.path), opened(bert, fewer), 10) == []
    write_log_weights(replace(own, facts={"data": {"data.train": [3]}}))
    with raises(DataError, own.path):
        notes(Path(own.path), opened(bert, fewer), 10)


def test_a_resumed_run_needs_the_same_file(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", (dpr_row(i) for i in range(20)))
    data, found = opened(bert, rows), list[TrainingData]()
    path = tmp_path / "w.safetensors"
    for power in (1, 0.5, 1):
        path.unlink(missing_ok=True)
        here(monkeypatch, "weights", str(rows), f"out={path}", f"power={power}")
        found.append(with_item_numbers(data, build_objective("nce", density="file", noise_file=str(path))))
    assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint
    (difference,) = changes(summary(found[0].manifest), found[1].manifest).different.values()
    assert "w.safetensors" in difference and "of other content" in difference
    assert with_item_numbers(data, build_objective("nce")) is data


def test_only_numbers_by_key_go_with_further_columns(bert: Path, tmp_path: Path) -> None:
    """Which file it is, its name says: so a run is refused before it reads anything."""
    rows = write_lines(tmp_path / "rows.jsonl", (dpr_row(i) for i in range(20)))
    nce = ["objective=nce", "objective.density=file", "objective.noise_file="]
    weighed = ["objective=one_sided_dpm", "objective.importance=log_q", "objective.importance_file="]
    for *others, file in (nce, weighed):
        check_config(compose_config(words(bert, rows, 0, *others, f"{file}a.npy")))
        check_config(compose_config(words(bert, rows, 1, *others, f"{file}a.safetensors")))
        with raises(ConfigError, "a.npy", ".safetensors", "data.negatives.per_row"):
            check_config(compose_config(words(bert, rows, 1, *others, f"{file}a.npy")))
