"""Builds the components of a training run from its configuration: model, training data, evaluators, objective, step."""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import AUTO, Batches, DrawnPositives, ItemKind, Mode, Title
from dyad.data.image_text.catalogue import caption_catalogue
from dyad.data.image_text.dataset import ImageText, LabelMaker, PairMaker, maker_with_mined
from dyad.data.image_text.stream import OneEpoch, Stream
from dyad.data.image_text.views import PictureViews
from dyad.data.loading.by_source import BySource
from dyad.data.loading.catalogue import Catalogue
from dyad.data.loading.classes import ClassNumbers, Labelled, RareOrder
from dyad.data.loading.drawn_items import DENSITIES, DrawnItems
from dyad.data.loading.loader import BatchSource
from dyad.data.loading.order import Order, local_rows
from dyad.data.question_passage.catalogue import passage_catalogue
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.question_passage.negatives import MinedNegatives
from dyad.data.question_passage.questions import open_questions
from dyad.data.question_passage.views import SingleTexts, open_texts
from dyad.data.sequence.dataset import NEXT, OWN, Sequences, catalogue_of
from dyad.data.sequence.open import open_sequences, sequence_files
from dyad.data.shards.manifest import FileEntry, Manifest, file_entries
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources, written_sources
from dyad.data.shards.storage import sha256_of
from dyad.data.tables.prepare import prepared_tables, table_options
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.eval.search.index_spec import check_spec
from dyad.evaluation.suite import build_evaluators
from dyad.run.best import refuse_unknown_metric
from dyad.run.calibrate import calibrate
from dyad.run.classes import class_inputs, open_labelled, with_classes
from dyad.run.item_weights import notes_on_weights
from dyad.run.objective_trial import try_on_one_rank
from dyad.train.cli.also import further_configs
from dyad.train.config import BatchNorm, Task, TrainConfig
from dyad.train.distributed.agreement import node_first, raise_on_all, rank_0_first
from dyad.train.distributed.sharding import shard_size
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.importance import ItemTable
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.objectives.base import Objective
from dyad.train.step.chunks import chunk_count
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.batch_norm import check_batch_norms
from dyad.train.towers.build import build_model, share_towers
from dyad.train.towers.libraries.published import may_download
from dyad.train.towers.libraries.transformers_model import weights_in_files
from dyad.train.towers.models import SequenceModel, TwoTowerModel
from dyad.train.towers.probe import on_meta
from dyad.train.towers.tower import Tower, TwoTower


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run.

    dataset: a map-style dataset whose keys are (epoch, sample id), or a stream. order: which sample ids each step gets;
    for a stream, only the number of steps. fingerprint: hash of everything in the data that changes the order of
    samples, or what is drawn for them. manifest: for each configuration key of the data, its files. drawn: draws
    further items for each batch, if the objective takes noise from all y items.
    """

    dataset: BatchSource | Stream
    order: Order | OneEpoch
    fingerprint: str
    manifest: Manifest
    drawn: DrawnItems | None = None


@dataclass(frozen=True)
class LossParts:
    """What one loss of a run is made of: the run's own, or a further one (also.NAME). notes: as of Parts."""

    config: TrainConfig
    model: TwoTowerModel
    data: TrainingData
    evaluators: Sequence[Evaluator]
    objective: Objective
    notes: Sequence[str]


@dataclass
class Parts:
    """The components of a training run.

    modules: everything with weights, by its name prefix in checkpoints. memory: the objective's per-sample state, None
    if it has none. step: the object that takes an optimiser step. total_steps: how many steps the run has in all.
    whole: the towers, with weights of whole shapes: of sharded ones a copy on the meta device.
    further: the parts of further losses by name; `data` and `evaluators` count theirs in. notes: lines for the log on
    what the losses take from the weights.
    """

    model: TwoTowerModel
    modules: dict[str, nn.Module]
    memory: SampleState | None
    data: TrainingData
    evaluators: Sequence[Evaluator]
    step: TrainStep
    total_steps: int
    further: dict[str, LossParts]
    whole: TwoTower
    notes: Sequence[str]


def build_parts(config: TrainConfig, world: World) -> Parts:
    """Build the components of a new run, with equal weights on every rank. Collective: every rank calls it.

    Raises ConfigError or DataError, on all ranks, for options or data that cannot be used.
    """
    torch.manual_seed(config.seed)
    own = _loss_parts(config, world)
    configs = {name: with_classes(own_config, world) for name, own_config in further_configs(config).items()}
    further = {name: _loss_parts(own_config, world, own.model, name) for name, own_config in configs.items()}
    total_steps = _total_steps(config, own.data)

    def loss_term(name: str, loss: LossParts) -> LossTerm:
        pairs = pairs_of_ranks(loss.config, world)
        return LossTerm(loss.model.towers, loss.objective, loss.config, total_steps, world, pairs, name)

    losses = {"": own, **further}
    for loss in losses.values():
        build = partial(_objective, loss.config, loss.data, loss.model)
        raise_on_all(world, partial(try_on_one_rank, loss.objective.options, build, world))
    whole = own.model.towers
    if shard_size(config.dist, world.size) > 1:
        whole = TwoTower(on_meta(cast(Tower, whole.x_tower)), on_meta(cast(Tower, whole.y_tower)))
    step = raise_on_all(world, lambda: TrainStep([loss_term(name, loss) for name, loss in losses.items()]))
    modules = {name: module for term in step.terms for name, module in term.modules.items()}
    evaluators = [evaluator for loss in losses.values() for evaluator in loss.evaluators]
    refuse_unknown_metric(config.checkpoint.best, evaluators)
    data = _with_further(own.data, {name: loss.data for name, loss in further.items()})
    notes = [f"also.{name}: {note}" if name else note for name, loss in losses.items() for note in loss.notes]
    return Parts(own.model, modules, own.objective.memory, data, evaluators, step, total_steps, further, whole, notes)


def _loss_parts(config: TrainConfig, world: World, of_run: TwoTowerModel | None = None, name: str = "") -> LossParts:
    """Build what one loss is made of. of_run: the model of the run, for a further loss with this name."""
    # open_clip writes a download straight to its place, where another process would read half of it
    build = node_first if may_download(config.model) else raise_on_all
    model = build(world, lambda: build_run_model(config, world))
    if of_run is not None:
        whole = config.data.rare is None  # the projection to one number is the score of one class
        raise_on_all(world, lambda: share_towers(model.towers, of_run.towers, f"also.{name}", whole))
    if shard_size(config.dist, world.size) == 1:  # what is sharded is moved layer by layer, part by part
        model.towers.to(world.device)
    data, evaluators = rank_0_first(world, lambda: (build_data(config, model), build_evaluators(config, model)))
    objective = raise_on_all(world, lambda: _objective(config, data, model)).to(world.device)
    notes = calibrate(config, objective, model.calibration)
    samples = sum(getattr(data.order, "sizes", ()))
    notes += raise_on_all(world, lambda: notes_on_weights(objective, data.dataset, samples, data.manifest))
    notes += raise_on_all(world, getattr(data.dataset, "notes", list))
    data = raise_on_all(world, lambda: with_weights(data, objective))
    if of_run is not None:
        encoder = Encoder.of(config, model, world)
        evaluators = [
            OfFurtherLoss(f"eval/{name}_{inner.name.removeprefix('eval/')}", inner.source, inner, encoder)
            for inner in evaluators
        ]
    return LossParts(config, model, data, evaluators, objective, notes)


def pairs_of_ranks(config: TrainConfig, world: World) -> tuple[int, ...] | None:
    """Return how many pairs each rank has in every step; None if side y has items of its own, or the numbers change."""
    if config.task in (Task.labelled, Task.sequence):
        return None
    of_ranks = [local_rows(config.global_batch_size, rank, world.size) for rank in range(world.size)]
    return tuple(rows.stop - rows.start for rows in of_ranks)


def _with_further(data: TrainingData, further: dict[str, TrainingData]) -> TrainingData:
    """Return the run's data with the fingerprints and files of further losses."""
    if not further:
        return data
    fingerprints = " ".join([data.fingerprint, *(own.fingerprint for own in further.values())])
    files = {f"also.{name}.{key}": entries for name, own in further.items() for key, entries in own.manifest.items()}
    fingerprint = hashlib.sha256(fingerprints.encode()).hexdigest()
    return replace(data, fingerprint=fingerprint, manifest={**data.manifest, **files})


def with_weights(data: TrainingData, objective: Objective) -> TrainingData:
    """Return the run's data with the objective's file of numbers by content key: a resumed run needs the same file."""
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
    """Return the data with further files, of this digest, on which losses depend. name: in the manifest."""
    fingerprint = hashlib.sha256(f"{data.fingerprint} {digest}".encode()).hexdigest()
    return replace(data, fingerprint=fingerprint, manifest={**data.manifest, name: files})


@dataclass(frozen=True)
class OfFurtherLoss(Evaluator):
    """An evaluator of a further loss, which encodes with the towers of that."""

    inner: Evaluator
    encoder: Encoder

    def higher_is_better(self) -> dict[str, bool]:
        return self.inner.higher_is_better()

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        own = self.encoder
        return self.inner.report(replace(encode, towers=own.towers, cosine=own.cosine), examples)


def batch_norms(config: TrainConfig, towers: nn.Module, world_size: int) -> str:
    """Describe in one line which statistics the batch norms of `towers` use; return "" if `towers` have none.

    world_size: the number of processes. Raises ConfigError if model.batch_norm does not work with these towers, for
    example with statistics of the global batch when each rank embeds its pairs in several chunks.
    """
    chunks = chunk_count(config.global_batch_size, world_size, config.chunk_size)
    rows, choice = config.global_batch_size // world_size, config.model.batch_norm
    line = check_batch_norms(towers, choice, rows, chunks, world_size)
    if line and config.data.rare is not None and choice is not BatchNorm.frozen:
        problem = f"model.batch_norm={choice}: with data.rare each side has statistics of its own, which hide its kind"
        raise ConfigError(f"{problem}. Set model.batch_norm=frozen, or take a tower without batch norm, such as cnn")
    return line


def build_data(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    """Open the training data of a configuration. Raises ConfigError or DataError for what cannot be used."""
    return DATA[config.task][config.data.items](config, model)


def build_run_model(config: TrainConfig, world: World) -> TwoTowerModel:
    """Build the model of a run. What is to be sharded stays in its files: `shard` reads the part of each rank.

    Published weights are not loaded where those of init_from take their place. Raises ConfigError as `build_model` and
    `batch_norms`.
    """
    is_sharded = shard_size(config.dist, world.size) > 1
    with weights_in_files() if is_sharded else nullcontext():
        model = build_model(config, load_pretrained=is_sharded or config.init_from is None)
    batch_norms(config, model.towers, world.size)
    return model


def _total_steps(config: TrainConfig, data: TrainingData) -> int:
    return config.steps or math.ceil((config.epochs or 0) * data.order.steps_per_epoch)


def run_options(config: TrainConfig, steps: int, **own: float | None) -> dict[str, Any]:
    """Return the options of a run's objective with the run's own numbers, where they leave them open.

    steps: of the whole run; with the samples of an epoch they give the epochs of the schedule objective.gamma=auto.
    own: option → its value in this run.
    """
    options = asdict(config.objective)
    options |= {name: value for name, value in own.items() if options.get(name, ...) is None}
    samples = options.get("samples_per_epoch") or options.get("num_samples")
    if options.get("gamma") == AUTO and samples:
        options["gamma_epochs"] = options["gamma_epochs"] or steps * config.global_batch_size / samples
    return options


def _objective(config: TrainConfig, data: TrainingData, model: TwoTowerModel) -> Objective:
    own: dict[str, float | None] = {}
    if isinstance(order := data.order, Order):
        of_classes = config.task is Task.labelled and config.data.rare is None
        samples = len(config.run.classes or []) if of_classes else getattr(data.dataset, "pairs", sum(order.sizes))
        own = {"num_samples": samples, "samples_per_epoch": order.steps_per_epoch * config.global_batch_size}
    if isinstance(model, SequenceModel):
        own |= {"width": model.width, "context_width": config.model.context.embed_dim}
    if data.drawn:  # Σ_y u is 1 where all scores are 0
        own["init_bias"] = -math.log(data.drawn.support)
    objective = build_objective(**run_options(config, _total_steps(config, data), **own))
    listed = config.task is Task.question_passage and config.data.passage.positives is DrawnPositives.all
    if (config.data.negatives.per_row or listed) and "negatives" not in objective.takes:
        takers = ", ".join(name for name, options in OBJECTIVES.items() if "negatives" in options.takes)
        raise ConfigError(
            f"objective={config.objective.name}: takes pairs only. Set data.negatives.per_row=0 and "
            f"data.passage.positives=one, or take one of {takers}"
        )
    return objective


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


def _picture_views(config: TrainConfig, model: Any) -> TrainingData:
    shards = open_shards(parse_sources(config.data.train, tables=prepared_tables(table_options(config.data))))
    return _of_shards(config, shards, PictureViews(shards, model.image, config.data, config.seed))


def _text_views(config: TrainConfig, model: TwoTowerModel) -> TrainingData:
    passage = config.data.passage
    model.tokenize([""], passage.length, [""] if passage.title is Title.pair else None)
    if not any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.towers.modules()):
        problem = "data.items=texts: no dropout of the text tower is on, and both views of a text would be equal"
        raise ConfigError(f"{problem}. Take an encoder that has dropout, and model.text.frozen=false")
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
    passage, negatives = config.data.passage, config.data.negatives
    # what would otherwise fail at the first batch, when there is a run folder already
    model.tokenize([""], config.data.question.length)
    model.tokenize([""], passage.length, [""] if passage.title is Title.pair else None)
    if negatives.refresh_every:
        check_spec(negatives.mining.index)
    questions = open_questions(config.data.train, config.data)
    mined = MinedNegatives(negatives.file, questions) if negatives.file else None
    dataset = QuestionPassage(questions, model.tokenize, config.data, config.seed, mined)
    fingerprint = hashlib.sha256(f"{questions.fingerprint} {mined.fingerprint if mined else ''}".encode()).hexdigest()
    manifest = {"data.train": questions.files}
    if passage.corpus and questions.corpus:
        manifest["data.passage.corpus"] = file_entries(questions.corpus.rows.shards.indexes)
    if mined:
        manifest["data.negatives.file"] = mined.files
    data = TrainingData(dataset, _order(config, questions.sizes, questions.weights), fingerprint, manifest)
    return _with_drawn_items(config, data, lambda: passage_catalogue(questions, model.tokenize, passage))


def _with_drawn_items(config: TrainConfig, data: TrainingData, catalogue: Callable[[], Catalogue]) -> TrainingData:
    """Return the data with what draws the noise of its objective, if it draws any. catalogue: makes that of the data.

    Raises DataError for a file of log q that is not of these data.
    """
    options, pairs = config.objective, config.global_batch_size
    if options.draws is None:
        return data
    items = catalogue()
    log_q_N = DENSITIES[options.draws](items, options.noise_file)
    return replace(data, drawn=DrawnItems(items, log_q_N, options.drawn_items(pairs), pairs, config.seed))


def _labelled(config: TrainConfig, model: Any) -> TrainingData:
    found, data, numbers = open_labelled(config.data.train, config), config.data, ClassNumbers(config.run.classes or [])
    if found.rows:
        samples = SingleTexts(found.rows, model.tokenize, data, config.seed, numbers)
    else:
        samples = ImageText(found.shards, LabelMaker(model.image, numbers, data, config.seed))
    if data.rare is None:
        return _of_shards(config, found.shards, Labelled(samples, *class_inputs(config, model)))
    is_rare = np.array([found.label(i) == data.rare for i in range(len(found.shards))])
    how = {"seed": config.seed, "shuffle": data.shuffle.name, "global_batch_size": config.global_batch_size}
    order = RareOrder(found.shards, is_rare, data, **how)
    return replace(_of_shards(config, found.shards, Labelled(samples)), order=order)


def _sequence(config: TrainConfig, model: Any) -> TrainingData:
    log, items = open_sequences(config.data, model)
    ahead = OWN if "lengths" in OBJECTIVES[config.objective.name].takes else NEXT
    dataset = Sequences(log, items, config.data.sequence.length, ahead)
    order = _order(config, [len(dataset.windows)], [1.0])
    data = TrainingData(dataset, order, dataset.fingerprint, {"data.train": log.files})
    files = sequence_files(config.data.train, config.data)
    return _with_drawn_items(config, data, lambda: catalogue_of(dataset, files, model.tokenize))


# Task → what data.items says, where the task leaves that open → what opens the data for a model
DATA: dict[Task, dict[ItemKind, Callable[[TrainConfig, Any], TrainingData]]] = {
    Task.image_text: dict.fromkeys(ItemKind, _image_text),
    Task.question_passage: dict.fromkeys(ItemKind, _question_passage),
    Task.views: {ItemKind.pictures: _picture_views, ItemKind.texts: _text_views},
    Task.labelled: dict.fromkeys(ItemKind, _labelled),
    Task.sequence: dict.fromkeys(ItemKind, _sequence),
}


def _order(config: TrainConfig, sizes: Sequence[int], weights: Sequence[float]) -> Order:
    how = {"seed": config.seed, "shuffle": config.data.shuffle.name}
    if config.data.batches is Batches.mixed:
        return Order(sizes, weights, global_batch_size=config.global_batch_size, **how)
    names = [source.path for source in written_sources(config.data.train, "data.train")]
    return BySource(sizes, weights, names, global_batch_size=config.global_batch_size, **how)
