"""One run from its configuration: build the parts, bring them to where the run stopped, fit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from data.errors import ConfigError
from data.loader import build_loader
from eval.encode import Encoder, Evaluator, build_encode
from eval.results import print_tables, result, write
from train import checkpoint
from train.checkpoint import CheckpointState
from train.config import TrainConfig, validate
from train.distributed import World, any_rank, barrier, broadcast_object
from train.loop import Plan, fit
from train.losses import build_objective
from train.metrics import Logger, build_logger
from train.run_state import locked, recorded
from train.runs import open_run, run_folder
from train.signals import StopRequest
from train.step import StepOptions, TrainStep
from train.tasks import TASKS, Data
from train.towers import Model, build_model
from train.tracking import check_tracking


@dataclass
class Parts:
    """What a run is made of. modules: everything with weights, by the name it has in a checkpoint."""

    model: Model
    modules: dict[str, nn.Module]
    data: Data
    evaluators: Sequence[Evaluator]
    step: TrainStep
    total_steps: int


def run_on(world: World, config: TrainConfig) -> str:
    """Train as configured; returns "finished" or "preempted". A collective: every rank calls it."""
    validate(config, world.size)
    folder = run_folder(config)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if world.rank == 0:
            check_tracking(config.tracking)
            open_run(config)
            stack.enter_context(locked(folder))
        found = broadcast_object(_resume_from(config, folder) if world.rank == 0 else None, world)
        parts = build_parts(config, world)
        state = None if found is None else _restore(found, parts, config)
        plan = _plan(config, parts, state, world)
        logger = _logger(config, folder, parts, plan, state) if world.rank == 0 else Logger()
        stack.callback(logger.close)
        record = stack.enter_context(recorded(folder if world.rank == 0 else None, plan.first_step, plan.total_steps))
        evaluation = Evaluation(parts, build_encoder(config, parts.model, world), folder, world)
        outcome = fit(
            plan,
            build_loader(
                parts.data.dataset,
                parts.data.order,
                rank=world.rank,
                world_size=world.size,
                first_step=plan.first_step,
                last_step=plan.total_steps,
                workers=config.data.workers,
            ),
            step=parts.step,
            evaluate=evaluation,
            save=_saver(config, folder, parts, logger, world),
            should_stop=lambda: any_rank(stop.requested, world),
            logger=logger,
        )
        record.write(outcome.status, outcome.step)
        evaluation.print_tables()
        logger.print(f"{outcome.status} at step {outcome.step}: {folder}")
        return outcome.status


def build_parts(config: TrainConfig, world: World) -> Parts:
    """Model, objective, data and step of a fresh run; equal weights on every rank."""
    torch.manual_seed(config.seed)
    model = build_model(config.model)
    model.towers.to(world.device)
    objective = build_objective(**asdict(config.objective)).to(world.device)
    modules = {"towers": model.towers, "objective": objective}
    task = TASKS[config.task.value]
    if world.rank > 0:
        barrier(world)  # rank 0 indexes new shards, the others find them indexed
    data = task.data(config, model)
    evaluators = task.evaluators(config, model)
    if world.rank == 0:
        barrier(world)
    total_steps = config.steps or math.ceil((config.epochs or 0) * data.order.steps_per_epoch)
    options = StepOptions(
        config.seed, total_steps, config.global_batch_size, config.chunk_size, config.precision, config.compile
    )
    step = TrainStep(model.towers, objective, config.optim, options, world)
    return Parts(model, modules, data, evaluators, step, total_steps)


class Evaluation:
    """Scores the weights as they are on everything, and leaves the JSON files of the newest scores in `eval/`."""

    def __init__(self, parts: Parts, encode: Encoder, folder: Path, world: World) -> None:
        self._parts, self._encode, self._folder, self._world = parts, encode, folder, world
        self._results: list[dict[str, Any]] = []

    def __call__(self) -> dict[str, float]:
        reports = [evaluator.report(self._encode) for evaluator in self._parts.evaluators]
        pairs = list(zip(reports, self._parts.evaluators, strict=True))
        if self._world.rank == 0:
            self._results = [result(report, evaluator, {}) for report, evaluator in pairs]
            for content in self._results:
                write(self._folder / "eval", content)
        return {f"{e.name}/{metric}": value for report, e in pairs for metric, value in report.metrics.items()}

    def print_tables(self) -> None:
        print_tables(self._results)


def build_encoder(config: TrainConfig, model: Model, world: World) -> Encoder:
    return build_encode(
        model.towers.x_tower,
        model.towers.y_tower,
        world,
        block=config.eval.block,
        workers=config.data.workers,
        precision=config.precision.value,
        cosine=config.objective.similarity.value == "cosine",
    )


def _resume_from(config: TrainConfig, folder: Path) -> Path | None:
    """The checkpoint to go on from, None for a fresh start. Rank 0 alone decides."""
    checkpoint.tidy(folder)
    if config.resume == "auto":
        return checkpoint.find(folder, print)
    if config.resume != "never":
        return checkpoint.locate(Path(config.resume), print)
    old = folder / "checkpoints"
    if old.exists():  # begin again, but lose nothing
        os.rename(old, folder / f"checkpoints-{time.strftime('%Y%m%d-%H%M%S')}")
    return None


def _restore(found: Path, parts: Parts, config: TrainConfig) -> CheckpointState:
    """Bring the parts to the state of a checkpoint of this run on this data."""
    state = checkpoint.load(found)
    for what, here in _identity(parts, config).items():
        if state.facts[what] != here:
            raise ConfigError(
                f"{found} was trained with {what} {state.facts[what]}, now it is {here}: the order of samples would "
                "differ. Use the same data and batch, or start another run.name with init_from"
            )
    checkpoint.restore(state, parts.modules, parts.step.optimizer)
    parts.step.load_state_dict(state.facts["step_state"])
    return state


def _identity(parts: Parts, config: TrainConfig) -> dict[str, Any]:
    """What fixes the order of samples."""
    return {
        "data_fingerprint": parts.data.fingerprint,
        "global_batch_size": config.global_batch_size,
        "seed": config.seed,
    }


def _plan(config: TrainConfig, parts: Parts, state: CheckpointState | None, world: World) -> Plan:
    return Plan(
        first_step=0 if state is None else state.step,
        total_steps=parts.total_steps,
        global_batch_size=config.global_batch_size,
        world_size=world.size,
        log_every=config.tracking.every,
        evaluate_every=config.eval.every if parts.evaluators else 0,
        save_every=config.checkpoint.every,
        evaluation_owed=state is not None and state.facts["evaluation_owed"],
    )


def _logger(config: TrainConfig, folder: Path, parts: Parts, plan: Plan, state: CheckpointState | None) -> Logger:
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return build_logger(
        folder,
        config.tracking,
        run_config={str(key): value for key, value in plain.items()},
        first_step=plan.first_step,
        total_steps=plan.total_steps,
        steps_per_epoch=parts.data.order.steps_per_epoch,
        global_batch_size=config.global_batch_size,
        evaluation_owed=plan.evaluation_owed,
        wandb_id=None if state is None else state.facts["wandb_id"],
    )


def _saver(
    config: TrainConfig, folder: Path, parts: Parts, logger: Logger, world: World
) -> Callable[[int, bool], None]:
    def save(step: int, evaluation_owed: bool) -> None:
        if world.rank == 0:
            facts = {
                **_identity(parts, config),
                "samples_seen": step * config.global_batch_size,
                "evaluation_owed": evaluation_owed,
                "wandb_id": logger.wandb_id,
                "world_size": world.size,
                "threads": torch.get_num_threads(),
                "step_state": parts.step.state_dict(),
            }
            state = checkpoint.capture(parts.modules, parts.step.optimizer, step, facts)
            checkpoint.save(folder, state, config.checkpoint.keep)
        barrier(world)

    return save
