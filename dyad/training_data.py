"""Open the training data of a run: the dataset, the order of its samples, and the list of its files."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import Batches, ItemKind, Mode, Title
from dyad.data.image_text.catalogue import caption_catalogue
from dyad.data.image_text.dataset import ImageText, LabelMaker, PairMaker, maker_with_mined
from dyad.data.image_text.image_views import ImageViews
from dyad.data.image_text.stream import OneEpoch, Stream
from dyad.data.loading.by_source import BySource
from dyad.data.loading.catalogue import Catalogue
from dyad.data.loading.class_batches import ClassNumbers, Labelled, RareOrder, class_key
from dyad.data.loading.drawn_items import DENSITIES, DrawnItems
from dyad.data.loading.loader import BatchSource
from dyad.data.loading.order import Order
from dyad.data.question_passage.catalogue import passage_catalogue
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.negatives import MinedNegatives
from dyad.data.question_passage.prompts import PromptAnswers
from dyad.data.question_passage.questions import QuestionRows, open_questions
from dyad.data.question_passage.text_views import SingleTexts, open_texts
from dyad.data.sequence.dataset import NEXT, OWN, Sequences, catalogue_of
from dyad.data.sequence.files import sequence_files
from dyad.data.sequence.open import open_sequences
from dyad.data.sequence.windows import Windows
from dyad.data.shards.manifest import FileEntry, Manifest, file_entries
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources, written_sources
from dyad.data.shards.storage import sha256_of
from dyad.data.tables.prepare import prepared_tables, table_options
from dyad.eval.search.index_spec import check_spec
from dyad.run.checks import row_settings
from dyad.run.class_names import class_inputs, open_labelled
from dyad.train.config import Task, TrainConfig
from dyad.train.losses import OBJECTIVES
from dyad.train.losses.gathered.importance import ItemTable
from dyad.train.run_folder.folder import resumed_run
from dyad.train.towers.models import TwoTowerModel

if TYPE_CHECKING:
    from dyad.train.losses.objectives.base import Objective  # would import torch's compiler, a second


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run.

    dataset: a map-style dataset whose keys are (epoch, sample id), or a stream. order: the sample ids of each step; for
    a stream, only the number of steps. fingerprint: SHA-256, in hexadecimal, of everything in the data that changes the
    order of samples, or what is drawn for them, and of files with numbers of items on which the loss depends. manifest:
    name, such as a configuration key → its files. drawn: draws further y items for each batch as noise samples; None if
    the objective takes none.
    """

    dataset: BatchSource | Stream
    order: Order | OneEpoch
    fingerprint: str
    manifest: Manifest
    drawn: DrawnItems | None = None


def build_data(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    """Open the training data of a configuration for a model, whose tokenizer and image size prepare the samples.

    Tables are converted to shards in the cache, and indexes that are missing are written, so other ranks should come
    after rank 0 (`rank_0_first`). Raises ConfigError for data that do not fit the configuration, DataError for damaged
    data.
    """
    check_texts(config, model)
    return DATA[config.task][config.data.items](config, model)


def check_texts(config: TrainConfig, model: Any) -> None:
    """Raise ConfigError if the model cannot take texts of the lengths that the configuration names.

    Raises it also for task=views of texts if no dropout is on, so that both views of a text would be equal. Without
    this check, the error would come with the first batch, after the run folder has been made. With images nothing is
    checked: their captions and class prompts have the length of the tower.
    """
    passage = config.data.passage
    if config.has_images or not config.has_texts:  # captions and prompts have the length of the tower
        return
    if config.task is Task.language_model:
        model.tokenize.check(passage.length)
        return
    if config.task is Task.question_passage:
        model.tokenize([""], config.data.question.length)
    model.tokenize([""], passage.length, [""] if passage.title is Title.pair else None)
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.towers.modules())
    if config.task is Task.views and not has_dropout:
        problem = "data.items=texts: no dropout of the text tower is on, and both views of a text would be equal"
        raise ConfigError(f"{problem}. Take an encoder that has dropout, and model.text.frozen=false")


def with_auxiliary_data(data: TrainingData, auxiliary: dict[str, TrainingData]) -> TrainingData:
    """Return `data` with a fingerprint and a manifest that also cover the data of the auxiliary losses.

    auxiliary: name of a loss → its data. Dataset, order and drawn stay those of `data`.
    """
    if not auxiliary:
        return data
    fingerprints = " ".join([data.fingerprint, *(own.fingerprint for own in auxiliary.values())])
    files = {f"also.{name}.{key}": entries for name, own in auxiliary.items() for key, entries in own.manifest.items()}
    fingerprint = hashlib.sha256(fingerprints.encode()).hexdigest()
    return replace(data, fingerprint=fingerprint, manifest={**data.manifest, **files})


def with_item_numbers(data: TrainingData, objective: "Objective") -> TrainingData:
    """Return `data` with the objective's file of one number per y item in its fingerprint and manifest.

    Such a file has numbers such as log q (see data/log_weights.py); a resumed run must then have the same file. For an
    objective without such a file, return `data` itself.
    """
    table = getattr(objective, "table", None)
    if data.drawn is not None and objective.options.noise_file:
        path, items = objective.options.noise_file, data.drawn.support
    elif isinstance(table, ItemTable):
        path, items = table.weights.path, len(table.weights.keys_n)
    else:
        return data
    entry = FileEntry(os.path.basename(path), os.path.getsize(path), items, sha256_of(path))
    return _with_file(data, "numbers by content key", [entry], entry.digest)


def _with_file(data: TrainingData, name: str, files: Sequence[FileEntry], digest: str) -> TrainingData:
    """Return `data` with further files, on which the loss depends, in its manifest and fingerprint.

    name: the key of the files in the manifest. digest: SHA-256 of their contents.
    """
    fingerprint = hashlib.sha256(f"{data.fingerprint} {digest}".encode()).hexdigest()
    return replace(data, fingerprint=fingerprint, manifest={**data.manifest, name: files})


def _image_text(config: TrainConfig, model: Any) -> TrainingData:
    make = partial(maker_with_mined, model.image, model.tokenize, config.data, config.seed)
    if config.data.mode is Mode.stream:
        data = _stream(config, maker := make())
    else:
        shards = open_shards(parse_sources(config.data.train, tables=prepared_tables(table_options(config.data))))
        data = _of_shards(config, shards, ImageText(shards, maker := make(shards)))
        data = _with_drawn_items(config, data, lambda: caption_catalogue(shards, maker))
    for mined in maker.mined_files:
        data = _with_file(data, mined.key, mined.files, mined.fingerprint)
    return data


def _image_views(config: TrainConfig, model: Any) -> TrainingData:
    shards = open_shards(parse_sources(config.data.train, tables=prepared_tables(table_options(config.data))))
    return _of_shards(config, shards, ImageViews(shards, model.image, config.data, config.seed))


def _text_views(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    rows = open_texts(config.data.train, config.data)
    return _of_shards(config, rows.shards, SingleTexts(rows, model.tokenize, config.data, config.seed))


def _of_shards(config: TrainConfig, shards: Shards, dataset: BatchSource) -> TrainingData:
    manifest = {"data.train": file_entries(shards.indexes)}
    return TrainingData(dataset, _order(config, shards.sizes, shards.weights), shards.fingerprint, manifest)


def _stream(config: TrainConfig, maker: PairMaker) -> TrainingData:
    assert config.steps
    sources = parse_sources(config.data.train, suffixes=(".tar",))
    stream = Stream(sources, maker, config.data, seed=config.seed, global_batch_size=config.global_batch_size)
    whole = FileEntry(f"a stream of {len(stream.shards)} shards", 0, 0, stream.fingerprint)
    return TrainingData(stream, OneEpoch(config.steps), stream.fingerprint, {"data.train": [whole]})


def _question_passage(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    questions, data = _of_questions(config, model, QuestionPassage)
    return _with_drawn_items(config, data, lambda: passage_catalogue(questions, model.tokenize, config.data.passage))


def _language_model(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    return _of_questions(config, model, PromptAnswers)[1]


def _of_questions(
    config: TrainConfig, model: TwoTowerModel, dataset_class: type[QuestionPassage]
) -> tuple[QuestionRows, TrainingData]:
    """Open the files of questions; return their rows, and the training data with a dataset of these rows.

    dataset_class: the class of the dataset. If data.negatives.file is given, the dataset has its mined hard negatives.
    """
    passage, negatives = config.data.passage, config.data.negatives
    if negatives.refresh_every:
        check_spec(negatives.mining.index)
    questions = open_questions(config.data.train, row_settings(config))
    mined = MinedNegatives(negatives.file, questions) if negatives.file else None
    dataset = dataset_class(questions, model.tokenize, config.data, config.seed, mined)
    fingerprint = hashlib.sha256(f"{questions.fingerprint} {mined.fingerprint if mined else ''}".encode()).hexdigest()
    manifest = {"data.train": questions.files}
    if passage.corpus and questions.corpus:
        manifest["data.passage.corpus"] = file_entries(questions.corpus.rows.shards.indexes)
    if mined:
        manifest["data.negatives.file"] = mined.files
    return questions, TrainingData(dataset, _order(config, questions.sizes, questions.weights), fingerprint, manifest)


def _with_drawn_items(config: TrainConfig, data: TrainingData, catalogue: Callable[[], Catalogue]) -> TrainingData:
    """Return `data` with TrainingData.drawn set, if the objective takes noise samples; else `data` itself.

    catalogue: returns the Catalogue of all y items of the data; it is called only if the objective takes noise samples.
    Raises DataError if the file objective.noise_file was not made for these data.
    """
    options, pairs = config.objective, config.global_batch_size
    if options.draws is None:
        return data
    items = catalogue()
    log_q_N = DENSITIES[options.draws](items, options.noise_file)
    return replace(data, drawn=DrawnItems(items, log_q_N, options.drawn_items(pairs), pairs, config.seed))


def _labelled(config: TrainConfig, model: Any) -> TrainingData:
    found, data, numbers = open_labelled(config.data.train, config), config.data, ClassNumbers(config.run.classes or [])
    is_rare = None
    if data.rare is not None:
        rare, labels = class_key(data.rare), (found.label(i) or "" for i in range(len(found.shards)))
        is_rare = np.array([class_key(label) == rare for label in labels])
    if found.rows:
        samples = SingleTexts(found.rows, model.tokenize, data, config.seed, numbers, is_rare)
    else:
        samples = ImageText(found.shards, LabelMaker(model.image, numbers, data, config.seed), is_rare)
    if is_rare is None:
        return _of_shards(config, found.shards, Labelled(samples, *class_inputs(config, model)))
    how = {"seed": config.seed, "shuffle": data.shuffle.name, "global_batch_size": config.global_batch_size}
    order = RareOrder(found.shards, is_rare, data, **how)
    return replace(_of_shards(config, found.shards, Labelled(samples)), order=order)


def _sequence(config: TrainConfig, model: Any) -> TrainingData:
    log, items = open_sequences(config.data, model)
    ahead = OWN if "lengths" in OBJECTIVES[config.objective.name].takes else NEXT
    dataset = Sequences(log, items, config.data.sequence.length, ahead)
    check_horizons(config, dataset.windows)
    order = _order(config, [len(dataset.windows)], [1.0])
    data = TrainingData(dataset, order, dataset.fingerprint, {"data.train": log.files})
    files = sequence_files(config.data.train, config.data)
    return _with_drawn_items(config, data, lambda: catalogue_of(dataset, files, model.tokenize))


def check_horizons(config: TrainConfig, windows: Windows) -> None:
    """Raise ConfigError if a new run of objective=cpc has matrices for more steps ahead than the longest window
    (training sample) has. With shared_w it has one matrix for all."""
    horizons = 0 if getattr(config.objective, "shared_w", True) else config.objective.horizons
    longest = int(windows.sizes.max(initial=0))
    if 0 < longest <= horizons and resumed_run(config) is None:
        raise ConfigError(
            f"objective.horizons={horizons}: the longest sample has {longest} steps, so the matrices of {longest} and "
            f"more steps ahead would never be trained. Set it to {longest - 1} or less; a sample has at most "
            f"data.sequence.length={config.data.sequence.length} steps"
        )


# Task → data.items → the function that opens the data; a task that ignores data.items has one function for all values
DATA: dict[Task, dict[ItemKind, Callable[[TrainConfig, Any], TrainingData]]] = {
    Task.image_text: dict.fromkeys(ItemKind, _image_text),
    Task.question_passage: dict.fromkeys(ItemKind, _question_passage),
    Task.views: {ItemKind.pictures: _image_views, ItemKind.texts: _text_views},
    Task.labelled: dict.fromkeys(ItemKind, _labelled),
    Task.sequence: dict.fromkeys(ItemKind, _sequence),
    Task.language_model: dict.fromkeys(ItemKind, _language_model),
}


def _order(config: TrainConfig, sizes: Sequence[int], weights: Sequence[float]) -> Order:
    how = {"seed": config.seed, "shuffle": config.data.shuffle.name}
    if config.data.batches is Batches.mixed:
        return Order(sizes, weights, global_batch_size=config.global_batch_size, **how)
    names = [source.path for source in written_sources(config.data.train, "data.train")]
    return BySource(sizes, weights, names, global_batch_size=config.global_batch_size, **how)
