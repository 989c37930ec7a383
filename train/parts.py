"""What a run is made of, built from its configuration: model, objective, data, evaluators, step, encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from data.config import DrawnPositives
from data.errors import ConfigError
from data.order import Order
from eval.encode import Encoder, Evaluator, build_encode
from train.chunks import chunk_count
from train.config import Task, TrainConfig
from train.distributed.agreement import raise_on_all, rank_0_first
from train.distributed.world import World
from train.losses import OBJECTIVES, build_objective
from train.losses.base import Objective
from train.losses.memory import SampleState
from train.losses.options.common import Similarity
from train.step import StepOptions, TrainStep
from train.tasks import Data, build_data, evaluators
from train.towers.batch_norm import check_batch_norms
from train.towers.build import TwoTowerModel, build_model


@dataclass
class Parts:
    """What a run is made of.

    modules: everything with weights, by the name it has in a checkpoint; memory: the objective's per-sample state.
    """

    model: TwoTowerModel
    modules: dict[str, nn.Module]
    memory: SampleState | None
    data: Data
    evaluators: Sequence[Evaluator]
    step: TrainStep
    total_steps: int


def build_parts(config: TrainConfig, world: World) -> Parts:
    """Model, objective, data and step of a fresh run; equal weights on every rank."""
    torch.manual_seed(config.seed)
    model = raise_on_all(world, lambda: _model(config, world))
    model.towers.to(world.device)
    data, scored_on = rank_0_first(world, lambda: (build_data(config, model), evaluators(config, model)))
    objective = raise_on_all(world, lambda: _objective(config, data)).to(world.device)
    modules = {"towers": model.towers, "objective": objective}
    total_steps = config.steps or math.ceil((config.epochs or 0) * data.order.steps_per_epoch)
    options = StepOptions(
        config.seed,
        total_steps,
        config.global_batch_size,
        config.chunk_size,
        config.keep_graphs,
        config.precision,
        config.compile,
    )
    step = raise_on_all(world, lambda: TrainStep(model.towers, objective, config.optim, options, world))
    return Parts(model, modules, objective.memory, data, scored_on, step, total_steps)


def _model(config: TrainConfig, world: World) -> TwoTowerModel:
    model = build_model(config.model, config.task)
    batch_norms(config, model.towers, world.size)
    return model


def batch_norms(config: TrainConfig, towers: nn.Module, world_size: int) -> str:
    """check_batch_norms of a run."""
    chunks = chunk_count(config.global_batch_size, world_size, config.chunk_size)
    rows = config.global_batch_size // world_size
    return check_batch_norms(towers, config.model.batch_norm, rows, chunks, world_size)


def _objective(config: TrainConfig, data: Data) -> Objective:
    objective = build_objective(**_objective_options(config, data))
    further = config.data.negatives.per_row or config.data.passage.positives is DrawnPositives.all
    if config.task is Task.question_passage and further and "negatives" not in objective.takes:
        takers = ", ".join(name for name, entry in OBJECTIVES.items() if "negatives" in entry.takes)
        raise ConfigError(
            f"objective={config.objective.name}: takes pairs only. Set data.negatives.per_row=0 and "
            f"data.passage.positives=one, or take one of {takers}"
        )
    return objective


def _objective_options(config: TrainConfig, data: Data) -> dict[str, Any]:
    """Per-sample state has a place for every training sample, and epochs are the run's, unless others are said."""
    known = {}
    if isinstance(data.order, Order):
        known["num_samples"] = sum(data.order.sizes)
        known["samples_per_epoch"] = data.order.steps_per_epoch * config.global_batch_size
    options = asdict(config.objective)
    return {name: known.get(name) if value is None else value for name, value in options.items()}


def build_encoder(
    config: TrainConfig, model: TwoTowerModel, world: World, should_stop: Callable[[], bool] = lambda: False
) -> Encoder:
    return build_encode(
        model.towers.x_tower,
        model.towers.y_tower,
        world,
        block=config.eval.block,
        workers=config.data.workers,
        precision=config.precision.name,
        cosine=config.objective.similarity is Similarity.cosine,
        should_stop=should_stop,
        timeout=config.data.timeout,
    )
