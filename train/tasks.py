"""What a task is made of: its training data, one row of DATA, and what it is scored on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.config import Mode, Title
from data.image_text import ImageText, PairMaker
from data.loader import BatchSource
from data.manifest import FileEntry, Manifest, file_entries
from data.negatives import MinedNegatives
from data.order import Order
from data.question_passage import QuestionPassage
from data.questions import open_questions
from data.shards import open_shards
from data.sources import parse_sources
from data.stream import OneEpoch, Stream
from eval.index_spec import check_spec
from eval.suite import build_evaluators
from train.config import Task
from train.towers.build import ImageTextModel, TextPairModel

if TYPE_CHECKING:
    from eval.encode import Evaluator
    from train.config import TrainConfig
    from train.towers.build import Model


@dataclass(frozen=True)
class Data:
    """The training data of a run: a map-style dataset over (epoch, id) and its order, or a stream; and what identifies
    it: in a word, and as the files that it is made of."""

    dataset: BatchSource | Stream
    order: Order | OneEpoch
    fingerprint: str
    manifest: Manifest


def build_data(config: TrainConfig, model: Model) -> Data:
    """The training data of the task. Raises ConfigError and DataError for what cannot be used."""
    return DATA[config.task](config, model)


def evaluators(config: TrainConfig, model: Model) -> Sequence[Evaluator]:
    """What a run is scored on while it trains."""
    return build_evaluators(
        config.eval.suite,
        config.data.val,
        task=config.task,
        model=model,
        data_config=config.data,
        eval_config=config.eval,
    )


def _image_text(config: TrainConfig, model: Model) -> Data:
    assert isinstance(model, ImageTextModel)
    if config.data.mode is Mode.stream:
        return _stream(config, model)
    shards = open_shards(parse_sources(config.data.train))
    dataset = ImageText(shards, model.image, model.tokenize, config.data, config.seed)
    manifest = {"data.train": file_entries(shards.indexes)}
    return Data(dataset, _order(config, shards.sizes, shards.weights), shards.fingerprint, manifest)


def _stream(config: TrainConfig, model: ImageTextModel) -> Data:
    assert config.steps
    maker = PairMaker(model.image, model.tokenize, config.data, config.seed)
    sources = parse_sources(config.data.train, suffixes=(".tar",))
    stream = Stream(sources, maker, config.data, seed=config.seed, global_batch_size=config.global_batch_size)
    whole = FileEntry(f"a stream of {len(stream.shards)} shards", 0, 0, stream.fingerprint)
    return Data(stream, OneEpoch(config.steps), stream.fingerprint, {"data.train": [whole]})


def _question_passage(config: TrainConfig, model: Model) -> Data:
    assert isinstance(model, TextPairModel)
    _check_late_options(config, model)
    questions = open_questions(config.data.train, config.data)
    mined = MinedNegatives.open(config.data.negatives.file, questions) if config.data.negatives.file else None
    dataset = QuestionPassage(questions, model.tokenize, config.data, config.seed, mined)
    both = f"{questions.fingerprint} {mined.fingerprint if mined else ''}"
    fingerprint = hashlib.sha256(both.encode()).hexdigest()
    manifest = {"data.train": questions.files}
    if config.data.passage.corpus and questions.corpus:
        manifest["data.passage.corpus"] = file_entries(questions.corpus.rows.shards.indexes)
    if mined:
        manifest["data.negatives.file"] = mined.files
    return Data(dataset, _order(config, questions.sizes, questions.weights), fingerprint, manifest)


def _check_late_options(config: TrainConfig, model: TextPairModel) -> None:
    """Raise ConfigError for what would else show at the first batch, when there is a run folder already."""
    passage, negatives = config.data.passage, config.data.negatives
    model.tokenize([""], config.data.question.length)
    model.tokenize([""], passage.length, [""] if passage.title is Title.pair else None)
    if negatives.refresh_every:
        check_spec(negatives.mining.index)


def _order(config: TrainConfig, sizes: Sequence[int], weights: Sequence[float]) -> Order:
    return Order(
        sizes,
        weights,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        shuffle=config.data.shuffle.value,
    )


DATA: dict[Task, Callable[[TrainConfig, Model], Data]] = {
    Task.image_text: _image_text,
    Task.question_passage: _question_passage,
}
