"""One run from its configuration: build the parts, bring them to where the run stopped, fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from data.batch import Batch
from data.config import DrawnPositives
from data.errors import ConfigError
from data.loader import BatchSource, build_loader
from data.question_passage import QuestionPassage
from eval.encode import Encoder, Evaluator, build_encode
from train import checkpoint
from train.agreement import agreed, from_rank_0, rank_0_first, rank_0_only
from train.checkpoint import CheckpointState
from train.config import Task, TrackingConfig, TrainConfig, validate
from train.distributed import World, any_rank
from train.evaluation import Evaluation
from train.loop import Plan, fit
from train.losses import OBJECTIVES, build_objective
from train.losses.base import Objective
from train.losses.diagnostics import diagnose, duplicates, saturation
from train.losses.memory import SampleState
from train.losses.options.common import Similarity
from train.metrics import Logger, build_logger
from train.refresh import Refresh
from train.run_state import locked, recorded
from train.runs import open_run, run_folder
from train.signals import StopRequest
from train.step import StepOptions, TrainStep
from train.tasks import Data, build_data, evaluators
from train.towers import Model, build_model
from train.tracking import decided


@dataclass
class Parts:
    """What a run is made of.

    modules: everything with weights, by the name it has in a checkpoint; memory: the objective's per-sample state.
    """

    model: Model
    modules: dict[str, nn.Module]
    memory: SampleState | None
    data: Data
    evaluators: Sequence[Evaluator]
    step: TrainStep
    total_steps: int


def run_on(world: World, config: TrainConfig) -> str:
    """Train as configured; returns "finished" or "preempted". A collective: every rank calls it.

    Nothing is written before all parts are built: a mistake that shows only then leaves no run folder.
    """
    validate(config, world.size)
    folder = run_folder(config)
    tracking = from_rank_0(world, lambda: decided(config.tracking, folder, print))
    parts = build_parts(config, world)
    with ExitStack() as stack:
        found = from_rank_0(world, lambda: _claim(config, folder, stack))
        state = agreed(world, lambda: _bring_to(found, parts, config))
        plan = _plan(config, parts, state, world)
        logger = rank_0_only(world, lambda: _logger(config, tracking, folder, parts, plan, state)) or Logger()
        stack.enter_context(logger)
        logger.print(_first_words(found, folder, plan, config))
        if config.task is Task.question_passage and "excluded" not in OBJECTIVES[config.objective.name].takes:
            logger.print(
                f"objective={config.objective.name} takes pairs only: what is right for another question of the batch "
                "as well counts as its negative; clip, info_nce, dpr and siglip leave it out"
            )
        record = stack.enter_context(recorded(folder if world.rank == 0 else None, plan.first_step, plan.total_steps))
        encode = build_encoder(config, parts.model, world)
        evaluation = Evaluation(
            parts.evaluators, encode, folder, last_step=plan.total_steps, examples=config.eval.examples
        )
        stop = stack.enter_context(StopRequest())
        outcome = fit(
            plan,
            _batches(config, parts, plan, found, encode, logger.print),
            step=parts.step,
            diagnose=lambda: _health(parts.step, config),
            evaluate=evaluation,
            save=_saver(config, folder, parts, logger, world),
            should_stop=lambda: any_rank(stop.requested, world),
            logger=logger,
        )
        record.write(outcome.status, outcome.step)
        logger.print(f"{outcome.status} at step {outcome.step}: {folder}")
        if outcome.status == "finished":
            evaluation.conclude(logger)
    evaluation.print_tables()
    return outcome.status


def build_parts(config: TrainConfig, world: World) -> Parts:
    """Model, objective, data and step of a fresh run; equal weights on every rank."""
    torch.manual_seed(config.seed)
    model = agreed(world, lambda: build_model(config.model, config.task))
    model.towers.to(world.device)
    data, scored_on = rank_0_first(world, lambda: (build_data(config, model), evaluators(config, model)))
    objective = agreed(world, lambda: _objective(config, data)).to(world.device)
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
    step = agreed(world, lambda: TrainStep(model.towers, objective, config.optim, options, world))
    return Parts(model, modules, objective.memory, data, scored_on, step, total_steps)


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
    known = {
        "num_samples": sum(data.order.sizes),
        "samples_per_epoch": data.order.steps_per_epoch * config.global_batch_size,
    }
    options = asdict(config.objective)
    return {name: known.get(name) if value is None else value for name, value in options.items()}


def _batches(
    config: TrainConfig, parts: Parts, plan: Plan, origin: Origin, encode: Encoder, note: Callable[[str], None]
) -> Iterable[Batch]:
    """One a step; where negatives are mined anew, the loader starts anew with them."""

    def load(dataset: BatchSource, first_step: int, last_step: int) -> Iterable[Batch]:
        return build_loader(
            dataset,
            parts.data.order,
            rank=encode.world.rank,
            world_size=encode.world.size,
            first_step=first_step,
            last_step=last_step,
            workers=config.data.workers,
        )

    dataset = parts.data.dataset
    if not config.data.negatives.refresh_every:
        return load(dataset, plan.first_step, plan.total_steps)
    assert isinstance(dataset, QuestionPassage)
    refresh = Refresh(dataset, encode, run_folder(config), origin.resume, note)
    return refresh.batches(plan.first_step, plan.total_steps, load)


def build_encoder(config: TrainConfig, model: Model, world: World) -> Encoder:
    return build_encode(
        model.towers.x_tower,
        model.towers.y_tower,
        world,
        block=config.eval.block,
        workers=config.data.workers,
        precision=config.precision.value,
        cosine=config.objective.similarity is Similarity.cosine,
    )


def _health(step: TrainStep, config: TrainConfig) -> dict[str, float]:
    """Diagnostics of the last step's embeddings, batch and loss. A collective."""
    cosine = config.objective.similarity is Similarity.cosine
    of_embeddings = diagnose(*step.embeddings, step.scalars.get("logit_scale"), cosine)
    return {**of_embeddings, **duplicates(*step.keys), **saturation(step.scalars)}


@dataclass(frozen=True)
class Origin:
    """Where the first weights come from. resume: a checkpoint to go on from; weights: one whose weights to take."""

    resume: Path | None = None
    weights: Path | None = None


def _claim(config: TrainConfig, folder: Path, stack: ExitStack) -> Origin:
    """Hold the run folder for as long as `stack` lives, and say where to begin. Rank 0 alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir}: cannot make {folder}: {error.strerror}") from error
    stack.enter_context(locked(folder))
    open_run(config)
    checkpoint.tidy(folder)
    if config.resume in ("auto", "never"):
        resume = checkpoint.find(folder, print)
    else:
        resume = checkpoint.locate(Path(config.resume), print)
    if resume or config.init_from is None:
        return Origin(resume)
    return Origin(weights=checkpoint.locate(Path(config.init_from), print))


def _first_words(origin: Origin, folder: Path, plan: Plan, config: TrainConfig) -> str:
    goal = f"{folder}: {plan.total_steps} steps of {config.global_batch_size}"
    if origin.resume:
        return f"{goal}, going on at step {plan.first_step} from {origin.resume}"
    return f"{goal}, beginning with the weights of {origin.weights}" if origin.weights else goal


def _bring_to(origin: Origin, parts: Parts, config: TrainConfig) -> CheckpointState | None:
    """The parts as `origin` has them; its state when the run goes on from there."""
    if origin.weights:
        _take_weights(origin.weights, parts)
    return _restore(origin.resume, parts, config) if origin.resume else None


def _take_weights(found: Path, parts: Parts) -> None:
    """The towers, whole. What the objective has is configured: another's temperature or bias would win silently."""
    try:
        checkpoint.restore_weights(checkpoint.load_weights(found), {"towers": parts.modules["towers"]})
    except ConfigError as error:
        raise ConfigError(f"init_from={found}: {error}") from error


def _restore(found: Path, parts: Parts, config: TrainConfig) -> CheckpointState:
    """Bring the parts to the state of a checkpoint of this run on this data."""
    state = checkpoint.load(found)
    for what, here in _identity(parts, config).items():
        if state.facts[what] != here:
            raise ConfigError(
                f"{found} was trained with another {what.replace('_', ' ')} ({str(state.facts[what])[:16]}, now "
                f"{str(here)[:16]}): the order of samples would differ.\n"
                "Use the same data and batch, or start another run.name with init_from"
            )
    _restore_memory(found, state, parts)
    checkpoint.restore(state, parts.modules, parts.step.optimizer)
    parts.step.load_state_dict(state.facts["step_state"])
    return state


def _restore_memory(found: Path, state: CheckpointState, parts: Parts) -> None:
    if parts.memory is None and not state.memory:
        return
    if parts.memory is None or not state.memory:
        raise ConfigError(f"{found} has {'' if state.memory else 'no '}per-sample state: it is of another objective")
    try:
        parts.memory.load(state.memory)
    except ConfigError as error:
        raise ConfigError(f"{found}: {error}") from error
    state.memory = {}  # each rank has its part, and the whole may be large


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


def _logger(
    config: TrainConfig,
    tracking: TrackingConfig,
    folder: Path,
    parts: Parts,
    plan: Plan,
    state: CheckpointState | None,
) -> Logger:
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return build_logger(
        folder,
        tracking,
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
        facts = {
            **_identity(parts, config),
            "samples_seen": step * config.global_batch_size,
            "evaluation_owed": evaluation_owed,
            "wandb_id": logger.wandb_id,
            "world_size": world.size,
            "threads": torch.get_num_threads(),
            "step_state": parts.step.state_dict(),
        }
        memory = parts.memory.gathered(world.device) if parts.memory else None

        def write_whole() -> None:
            state = checkpoint.capture(parts.modules, parts.step.optimizer, step, facts, memory)
            checkpoint.save(folder, state, config.checkpoint.keep)

        rank_0_only(world, write_whole)

    return save
