"""Build the components of a training run from its configuration: model, training data, evaluators, objective, step."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from dyad.data.base.errors import ConfigError
from dyad.data.config import AUTO, DrawnPositives
from dyad.data.loading.order import Order, local_rows
from dyad.eval.encode.encoder import Encoder, Evaluator, Report
from dyad.evaluation.suite import build_evaluators
from dyad.run.best_checkpoint import refuse_unknown_metric
from dyad.run.calibrate import calibrate, describe_positions, describe_scores
from dyad.run.class_names import resolve_classes
from dyad.run.item_weights import check_item_weights
from dyad.run.objective_trial import compare_with_one_rank
from dyad.train.cli.also import auxiliary_configs, errors_of
from dyad.train.config import LISTED, BatchNorm, Task, TrainConfig
from dyad.train.distributed.agreement import node_first, raise_on_all, rank_0_first
from dyad.train.distributed.sharding import shard_size
from dyad.train.distributed.world import World
from dyad.train.losses import OBJECTIVES, build_objective
from dyad.train.losses.gathered.sample_state import SampleState
from dyad.train.losses.objectives.base import Objective
from dyad.train.losses.objectives.cpc import Cpc
from dyad.train.run_schedule import total_steps
from dyad.train.step.chunks import chunk_count
from dyad.train.step.loss_term import LossTerm
from dyad.train.step.step import TrainStep
from dyad.train.towers.batch_norm import check_batch_norms
from dyad.train.towers.build import build_model, share_towers
from dyad.train.towers.libraries.kept_files import kept_model
from dyad.train.towers.libraries.open_clip import may_download
from dyad.train.towers.libraries.transformers_model import weights_in_files
from dyad.train.towers.models import SequenceModel, TwoTowerModel
from dyad.train.towers.sequence import SequenceTower
from dyad.train.towers.tower import Tower, TwoTower
from dyad.train.towers.trial import on_meta
from dyad.training_data import TrainingData, build_data, with_auxiliary_data, with_item_numbers


@dataclass(frozen=True)
class LossComponents:
    """The components of one loss: the main loss of a run, or an auxiliary one (also.NAME).

    config: that of the loss, which differs from the run's for an auxiliary loss. notes: lines for the log on what the
    loss takes from the initial weights, and on its data.
    """

    config: TrainConfig
    model: TwoTowerModel
    data: TrainingData
    evaluators: Sequence[Evaluator]
    objective: Objective
    notes: Sequence[str]


@dataclass
class Components:
    """The components of a training run.

    modules: everything with weights, by its name prefix in checkpoints. sample_state: per-sample state of the main
    objective, None if it has none. step: takes an optimiser step. total_steps: number of steps of the run. unsharded:
    the towers with weights of whole shape; if towers are sharded, a copy on the meta device. auxiliary: name of an
    auxiliary loss → its components. data: those of the main loss, with a fingerprint and a manifest that cover all
    losses. evaluators: those of all losses. notes: lines for the log on what the losses take from the initial weights,
    and on their data.
    """

    model: TwoTowerModel
    modules: dict[str, nn.Module]
    sample_state: SampleState | None
    data: TrainingData
    evaluators: Sequence[Evaluator]
    step: TrainStep
    total_steps: int
    auxiliary: dict[str, LossComponents]
    unsharded: TwoTower
    notes: Sequence[str]


def build_components(config: TrainConfig, world: World, origin: Path | None = None) -> Components:
    """Build the components of a new run, with equal weights on every rank. Every rank must call it.

    Seeds torch's global generator with config.seed. Downloads published weights, and writes indexes of data, that the
    caches lack. Puts the towers on the device of the rank, sharded if the configuration asks for it. A plugin's
    objective is tried on several ranks (dyad/run/objective_trial.py). origin: the run folder that gives the weights:
    unless they are sharded, the models are built from its copies of their files, and no published weights are loaded.
    Raises ConfigError or DataError, on all ranks, for options or data that cannot be used.
    """
    torch.manual_seed(config.seed)
    restored = config.init_from is not None or origin is not None
    copies = origin if shard_size(config.dist, world.size) == 1 else None  # sharded towers begin with the weights, too

    def built(of_loss: TrainConfig, main: TwoTowerModel | None = None, name: str = "") -> LossComponents:
        of_copies = replace(of_loss, model=kept_model(of_loss.model, copies))
        return _loss_components(of_copies, world, restored, main, name)

    own = built(config)
    auxiliary: dict[str, LossComponents] = {}
    for name, of_loss in auxiliary_configs(config).items():
        with errors_of(name):
            auxiliary[name] = built(resolve_classes(of_loss, world), own.model, name)
    steps = total_steps(config, own.data.order.steps_per_epoch)

    def loss_term(name: str, loss: LossComponents) -> LossTerm:
        pairs = pairs_of_ranks(loss.config, world)
        return LossTerm(loss.model.towers, loss.objective, loss.config, steps, world, pairs, name)

    losses = {"": own, **auxiliary}
    for loss in losses.values():
        build = partial(_objective, loss.config, loss.data, loss.model)
        raise_on_all(world, partial(compare_with_one_rank, loss.objective.options, build, world))
    unsharded = own.model.towers
    if shard_size(config.dist, world.size) > 1:
        unsharded = TwoTower(on_meta(cast(Tower, unsharded.x_tower)), on_meta(cast(Tower, unsharded.y_tower)))
    step = raise_on_all(world, lambda: TrainStep([loss_term(name, loss) for name, loss in losses.items()]))
    modules = {name: module for term in step.terms for name, module in term.modules.items()}
    evaluators = [evaluator for loss in losses.values() for evaluator in loss.evaluators]
    refuse_unknown_metric(config.checkpoint.best, evaluators)
    data = with_auxiliary_data(own.data, {name: loss.data for name, loss in auxiliary.items()})
    notes = [f"also.{name}: {note}" if name else note for name, loss in losses.items() for note in loss.notes]
    return Components(
        own.model, modules, own.objective.sample_state, data, evaluators, step, steps, auxiliary, unsharded, notes
    )


def _loss_components(
    config: TrainConfig, world: World, restored: bool, main_model: TwoTowerModel | None = None, name: str = ""
) -> LossComponents:
    """Build the components of one loss. Every rank must call it.

    restored: whether weights of a checkpoint will replace those of the model (`build_run_model`). main_model: for an
    auxiliary loss, the model of the run; towers of the new model that are like towers of main_model are replaced by
    these (`share_towers`). None for the run's own loss. name: NAME of the auxiliary loss also.NAME.
    Raises ConfigError or DataError, on all ranks, for options or data that cannot be used, and if an auxiliary loss
    shares no tower.
    """
    # open_clip downloads directly to the final path, where another process could read an incomplete file
    build = node_first if may_download(config) else raise_on_all
    model = build(world, lambda: build_run_model(config, world, restored))
    if main_model is not None:
        # with data.rare, the projection to one number belongs to that class, so trunks alone are shared
        whole = config.data.rare is None
        raise_on_all(world, lambda: share_towers(model.towers, main_model.towers, whole))
    if shard_size(config.dist, world.size) == 1:  # sharded towers are moved layer by layer instead
        model.towers.to(world.device)
    data, evaluators = rank_0_first(world, lambda: (build_data(config, model), build_evaluators(config, model)))
    objective = raise_on_all(world, lambda: _objective(config, data, model)).to(world.device)
    if isinstance(tower := model.towers.x_tower, SequenceTower) and isinstance(objective, Cpc):
        tower.set_prediction_matrices(objective.w_HDD)
    notes = calibrate(config, objective, model.calibration)
    notes += [] if restored else describe_positions(config)
    samples = sum(getattr(data.order, "sizes", ()))
    notes += raise_on_all(world, lambda: check_item_weights(objective, data.dataset, samples, data.manifest))
    notes += raise_on_all(world, lambda: describe_scores(objective, data.dataset, samples))
    notes += raise_on_all(world, getattr(data.dataset, "notes", list))
    data = raise_on_all(world, lambda: with_item_numbers(data, objective))
    if main_model is not None:
        encoder = replace(Encoder.of(config, model, world), width=config.eval.width)
        evaluators = [
            AuxiliaryEvaluator(f"eval/{name}_{inner.name.removeprefix('eval/')}", inner.source, inner, encoder)
            for inner in evaluators
        ]
    return LossComponents(config, model, data, evaluators, objective, notes)


def pairs_of_ranks(config: TrainConfig, world: World) -> tuple[int, ...] | None:
    """Return how many pairs each rank has in every step, in rank order.

    Returns None if the items of side y are not the partners of those of side x (task=labelled and task=sequence), so
    that there are no pairs, or their number changes.
    """
    if config.task in (Task.labelled, Task.sequence):
        return None
    of_ranks = [local_rows(config.global_batch_size, rank, world.size) for rank in range(world.size)]
    return tuple(rows.stop - rows.start for rows in of_ranks)


@dataclass(frozen=True)
class AuxiliaryEvaluator(Evaluator):
    """Evaluates the model of an auxiliary loss: calls `inner` with the towers of that loss in place of the run's.

    inner: the evaluator of a data set. encoder: an encoder with the towers of the auxiliary loss.
    """

    inner: Evaluator
    encoder: Encoder

    def higher_is_better(self) -> dict[str, bool]:
        return self.inner.higher_is_better()

    def report(self, encode: Encoder, examples: int | None = None) -> Report:
        own = self.encoder
        return self.inner.report(replace(encode, towers=own.towers, cosine=own.cosine), examples)


def describe_batch_norms(config: TrainConfig, towers: nn.Module, world_size: int) -> str:
    """Describe in one line which statistics the batch norms of `towers` use; return "" if `towers` have none.

    world_size: the number of processes. Raises ConfigError as `check_batch_norms`; also for batches of one pair and
    with data.rare, unless the statistics are frozen.
    """
    chunks = chunk_count(config.global_batch_size, world_size, config.chunk_size)
    rows, choice = config.global_batch_size // world_size, config.model.batch_norm
    line = check_batch_norms(towers, choice, rows, chunks, world_size)
    if line and config.data.rare is not None and choice is not BatchNorm.frozen:
        problem = f"model.batch_norm={choice}: with data.rare each side has statistics of its own, which hide its kind"
        raise ConfigError(f"{problem}. Set model.batch_norm=frozen, or take a tower without batch norm, such as cnn")
    one = config.global_batch_size == 1 and config.task is not Task.sequence  # a sequence has many items
    if line and one and choice is not BatchNorm.frozen:
        raise ConfigError(f"model.batch_norm={choice}: one pair has no statistics. Set global_batch_size to 2 or more")
    return line


def build_run_model(config: TrainConfig, world: World, restored: bool = False) -> TwoTowerModel:
    """Build the model of a run on the CPU, with the published weights that the configuration names.

    Weights that are to be sharded stay in their files, where `shard` (train/distributed/sharding.py) reads each rank's
    part. Without sharding, published weights are not loaded if those of a checkpoint will replace them (`restored`).
    Random weights come from torch's global generator. Raises ConfigError as `build_model` and `describe_batch_norms`.
    """
    is_sharded = shard_size(config.dist, world.size) > 1
    with weights_in_files() if is_sharded else nullcontext():
        model = build_model(config, load_pretrained=is_sharded or not restored)
    describe_batch_norms(config, model.towers, world.size)
    return model


def objective_options(config: TrainConfig, steps: int, **own: float | None) -> dict[str, Any]:
    """Return the options of the run's objective, option → value, with unset ones filled in from the run.

    steps: number of steps of the run. own: option → the value to use if the objective has this option and it is None.
    With objective.gamma=auto, gamma_epochs is computed too if it is unset: the number of passes over the data.
    """
    options = asdict(config.objective)
    options |= {name: value for name, value in own.items() if options.get(name, ...) is None}
    samples = options.get("samples_per_epoch") or options.get("num_samples")
    if options.get("gamma") == AUTO and samples:
        options["gamma_epochs"] = options["gamma_epochs"] or steps * config.global_batch_size / samples
    return options


def _objective(config: TrainConfig, data: TrainingData, model: TwoTowerModel) -> Objective:
    """Build the objective of a loss, with options that its data and model determine filled in, on the CPU.

    Raises ConfigError for a typed objective.width or context_width that differs from the model's, and for data with
    hard negatives or several positives if the objective takes pairs only.
    """
    own: dict[str, float | None] = {}
    if isinstance(order := data.order, Order):
        of_classes = config.task is Task.labelled and config.data.rare is None
        samples = len(config.run.classes or []) if of_classes else getattr(data.dataset, "pairs", sum(order.sizes))
        own = {"num_samples": samples, "samples_per_epoch": order.steps_per_epoch * config.global_batch_size}
    if isinstance(model, SequenceModel):
        own |= {"width": model.width, "context_width": config.model.context.embed_dim or model.width}
        for name in ("width", "context_width"):
            if (typed := getattr(config.objective, name, None)) not in (None, own[name]):
                raise ConfigError(f"objective.{name}={typed}: the model has {own[name]}. Leave it out")
    if data.drawn:  # so that Σ_y u over all items is 1 while all scores are 0
        own["init_bias"] = -math.log(data.drawn.support)
    objective = build_objective(**objective_options(config, total_steps(config, order.steps_per_epoch), **own))
    listed = config.task in LISTED and config.data.passage.positives is DrawnPositives.all
    if (config.data.negatives.per_row or listed) and "negatives" not in objective.takes:
        takers = ", ".join(n for n, o in OBJECTIVES.items() if "negatives" in o.takes and o.inputs == "pairs")
        raise ConfigError(
            f"objective={config.objective.name}: takes pairs only. Set data.negatives.per_row=0 and "
            f"data.passage.positives=one, or take one of {takers}"
        )
    return objective
