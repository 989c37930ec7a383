"""The prefixes of a source of data.train: what the towers read, and which run it is."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_bert
from helpers.messages import raises
from helpers.rows import dpr_row, write_beir, write_lines

from dyad.data.base.errors import ConfigError
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.shards.manifest import changes, summary
from dyad.doctor import configuration as doctor
from dyad.eval.mine.passages import QuestionsAndPassages
from dyad.evaluation.mine import open_questions_and_passages, training_command
from dyad.evaluation.suite import build_evaluators, check_suite
from dyad.train.cli.compose import compose_config
from dyad.train.config import TrainConfig
from dyad.train.towers.build import build_model
from dyad.train.towers.models import TwoTowerModel
from dyad.training_data import TrainingData, build_data

TOLD = {"question_prefix": "instruct\nquery ", "passage_prefix": ""}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny_bert.write(folder)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    rows = [[dpr_row(i, hard=2, positives=2) for i in range(first, first + 40)] for first in (0, 40)]
    return [str(write_lines(tmp_path / f"{name}.jsonl", part)) for name, part in zip("ab", rows, strict=True)]


def opened(bert: Path, train: Any, *words: str) -> tuple[TrainConfig, TwoTowerModel, TrainingData]:
    config = compose_config(
        [
            "experiment=mnrl",
            f"model.text.name={bert}",
            "data.train=x",
            "data.question.prefix='ask '",
            "data.passage.prefix='read '",
            "data.passage.positives=all",
            *(words or ["global_batch_size=16"]),
        ]
    )
    config.data.train = train
    model = build_model(config)
    return config, model, build_data(config, model)


def test_towers_read_the_prefixes_of_the_source(bert: Path, files: list[str]) -> None:
    """Real tokens, of questions, positives, further positives and hard negatives; an empty prefix is none."""
    _, model, data = opened(bert, [{"path": files[0], **TOLD}, files[1]])
    assert isinstance(data.dataset, QuestionPassage)
    batch = pickle.loads(pickle.dumps(data.dataset)).__getitems__([(0, 3), (0, 43)])
    questions = ["instruct\nquery what's 3", "ask what's 43"]
    assert batch.x.tolist() == model.tokenize(questions, 256).tolist()
    rows = data.dataset.drawn(0, 3), data.dataset.drawn(0, 43)
    passages = [
        f"{prefix}P{i} {row.positive.text}" for prefix, i, row in zip(("", "read "), (3, 43), rows, strict=True)
    ]
    extra = [
        f"{prefix}{passage.title} {passage.text}"
        for prefix, row in zip(("", "read "), rows, strict=True)
        for passage, _ in row.extra
    ]
    assert batch.extra is not None and len(extra) == 4
    whole = model.tokenize([*passages, *extra], 256)
    assert batch.y.tolist() == whole[:2].tolist() and batch.extra.y.tolist() == whole[2:].tolist()
    plain = opened(bert, files)[2].dataset
    assert isinstance(plain, QuestionPassage)
    other = plain.__getitems__([(0, 3), (0, 43)])
    assert other.x_keys.tolist() == batch.x_keys.tolist() and other.y_keys.tolist() == batch.y_keys.tolist()
    assert other.x.shape != batch.x.shape


def test_a_changed_prefix_is_other_data(bert: Path, files: list[str]) -> None:
    """Without prefixes the fingerprint is that of a plain path, so that runs of older versions go on."""
    plain, mapped, told = (
        opened(bert, [first, files[1]])[2] for first in (files[0], {"path": files[0]}, {"path": files[0], **TOLD})
    )
    other = opened(bert, [{"path": files[0], **TOLD, "passage_prefix": "p "}, files[1]])[2]
    assert plain.fingerprint == mapped.fingerprint and plain.manifest == mapped.manifest
    assert len({plain.fingerprint, told.fingerprint, other.fingerprint}) == 3
    found = changes(summary(told.manifest), other.manifest)
    assert list(found.different) == ["data.train"] and "of other content" in found.different["data.train"]


def test_batches_by_source_and_folders(bert: Path, files: list[str], tmp_path: Path) -> None:
    beir = write_beir(tmp_path / "beir", passages=60, queries=20)
    sources = [{"path": str(beir), "weight": 2, **TOLD}, files[0]]
    _, _, data = opened(bert, sources, "data.batches=by_source", "global_batch_size=16")
    assert data.order.steps_per_epoch == 18 * 2 // 16 + 40 // 16
    assert (
        isinstance(data.dataset, QuestionPassage)
        and data.dataset.questions.question(0).prefix == TOLD["question_prefix"]
    )
    with raises(ConfigError, "data.batches=by_source"):
        opened(bert, [str(beir), files[0]], "data.batches=by_source", "global_batch_size=20")


def test_evaluations_take_the_global_prefixes(bert: Path, files: list[str]) -> None:
    config, model, _ = opened(bert, [{"path": files[0], **TOLD}], f"data.val={files[1]}", "global_batch_size=16")
    (told,) = (line for line in doctor.data(config) if "question_prefix" in line.text)
    assert repr(TOLD["question_prefix"]) in told.text and "weight=1" in told.text
    (evaluator,) = build_evaluators(config, model)
    assert evaluator.name == "val"
    config.data.val = [{"path": files[1], **TOLD}]
    with raises(ConfigError, "data.train"):
        check_suite(config)


@pytest.mark.parametrize(
    ("first", "second", "read"),
    [("p ", "p ", "p "), (None, None, "read "), ("read ", None, "read "), ("p ", "to ", "read ")],
)
def test_mining_reads_what_training_reads(
    bert: Path, files: list[str], tmp_path: Path, first: str | None, second: str | None, read: str
) -> None:
    """By command and while training: each question with the prefix of its source, passages with the one of all sources,
    or the global one if they have several. The printed command trains with those of the sources again."""
    sources = [{"path": files[0], **TOLD, "passage_prefix": first}, {"path": files[1], "passage_prefix": second}]
    config, model, training = opened(bert, sources)
    data, corpus = open_questions_and_passages(config, model, tmp_path / "mined", None, write=True)
    assert isinstance(data, QuestionsAndPassages) and isinstance(training.dataset, QuestionPassage)
    batch = training.dataset.__getitems__([(0, 3), (0, 43)])
    for mined in (data, replace(data, questions=training.dataset.questions)):
        asked, passages = (side.inputs for side in mined.sides())
        assert asked.take([3, 43]).tolist() == batch.x.tolist()
        at = [data.item_keys.tolist().index(key) for key in batch.y_keys.tolist()]
        texts = [f"{read}{passage.title} {passage.text}" for passage in map(data.corpus.__getitem__, at)]
        assert passages.take(at).tolist() == model.tokenize(texts, 256).tolist()
        assert (passages.take(at).tolist() == batch.y.tolist()) == (first != "p " or second == "p ")
    assert "question_prefix" in training_command(config, Path("run"), Path("mined.jsonl"), corpus, None)
