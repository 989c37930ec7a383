"""One run from its configuration: build the parts, bring them to where the run stopped, fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data.batch import Batch
from data.config import Mode
from data.loader import BatchSource, build_loader
from data.order import Order
from data.question_passage import QuestionPassage
from data.stream import Stream
from eval.encode import Encoder
from train.config import Task, TrackingConfig, TrainConfig, validate
from train.distributed.agreement import agreed, from_rank_0, rank_0_only
from train.distributed.contact import in_contact
from train.distributed.digest import code_digest, refuse_different_starts
from train.distributed.world import World, any_rank, gather_objects
from train.evaluation import Evaluation
from train.files import writable
from train.loop import Plan, fit
from train.losses import OBJECTIVES
from train.losses.diagnostics import diagnose, duplicates, saturation
from train.losses.options.common import Similarity
from train.origin import Origin, Start, bring_to, claim, identity
from train.parts import Parts, batch_norms, build_encoder, build_parts
from train.refresh import Refresh
from train.runs import checkpoint
from train.runs.checkpoint import CheckpointState
from train.runs.folder import COUNTED, all_keys, open_run, put_aside, run_folder
from train.runs.ledger import Ledger
from train.runs.run_state import recorded
from train.runs.saving import Saves
from train.runs.substituted import Substituted
from train.signals import StopRequest
from train.step import TrainStep
from train.towers.sentence_folder import compared
from train.tracking.metrics import Logger, build_logger
from train.tracking.trackers import resolve_wandb_mode
from train.watch import Watch


def run_on(world: World, config: TrainConfig) -> str:
    """Train as configured; returns "finished" or "preempted". A collective: every rank calls it.

    Nothing is written before all parts are built: a mistake that shows only then leaves no run folder.
    """
    refuse_different_starts(world, {**_of_all_ranks(config), "torch": torch.__version__, "code": code_digest()})
    validate(config, world.size)
    folder = run_folder(config)
    tracking = from_rank_0(world, lambda: resolve_wandb_mode(config.tracking, folder, print))
    parts = build_parts(config, world)
    refuse_different_starts(world, {"data": parts.data.fingerprint})
    with ExitStack() as stack:
        found = from_rank_0(world, lambda: claim(config, folder, stack))
        start = agreed(world, lambda: bring_to(found, parts, config))
        plan = _plan(config, parts, start.state, world)
        logger = rank_0_only(world, lambda: _logger(config, tracking, folder, parts, plan, start)) or Logger()
        stack.enter_context(logger)
        for line in _first_words(found, start, parts, plan, config, world):
            logger.print(line)
        record = stack.enter_context(recorded(folder if world.rank == 0 else None, plan.first_step, plan.total_steps))
        stop = stack.enter_context(StopRequest())

        def should_stop() -> bool:
            return any_rank(stop.requested, world)

        encode = build_encoder(config, parts.model, world, should_stop)
        evaluation = Evaluation(
            parts.evaluators,
            encode,
            folder,
            last_step=plan.total_steps,
            examples=config.eval.examples,
            say=logger.print,
        )
        ledger = stack.enter_context(Ledger(folder if world.rank == 0 else None, plan.first_step, logger.print))
        substituted = Substituted(config.data, config.global_batch_size, world, ledger, logger.print)
        if start.state:
            substituted.load_state_dict(start.state.facts["substituted"])
        saves = stack.enter_context(_saves(config, folder, plan, logger, ledger))
        stack.enter_context(in_contact(world, lambda: parts.step.place))
        watch = Watch(parts.step, parts.modules, config.dist, world, logger.print, ledger.note)
        watch.compare(plan.first_step)
        save = _saver(config, parts, saves, watch, substituted, logger, world)
        if start.counted_anew:
            _begin_count(plan, save, folder, world)
        batches = watch.batches(_batches(config, parts, plan, found, encode, logger.print))
        outcome = fit(
            plan,
            substituted.batches(plan.first_step, batches),
            step=watch.step,
            diagnose=lambda: {**watch.judge(), **_health(parts.step, config), **substituted.tell()},
            evaluate=evaluation,
            save=save,
            should_stop=should_stop,
            logger=logger,
        )
        record.write(outcome.status, outcome.step, checkpoint_seconds=round(saves.seconds, 3))
        if substituted.total:
            logger.print(f"{substituted.total:,} samples could not be used, others took their place: {ledger.path}")
        logger.print(f"{outcome.status} at step {outcome.step}: {folder}")
        if outcome.status == "finished":
            evaluation.conclude(logger)
    evaluation.print_tables()
    return outcome.status


def _of_all_ranks(config: TrainConfig) -> dict[str, Any]:
    """What must be the same on every rank: all keys but those that say how much a machine can."""
    free = ("model.memo_mb",) if config.data.mode is Mode.stream else ("data.workers", "model.memo_mb")
    return {key: value for key, value in all_keys(config).items() if key not in free}


def _batches(
    config: TrainConfig, parts: Parts, plan: Plan, origin: Origin, encode: Encoder, note: Callable[[str], None]
) -> Iterable[Batch]:
    """One a step; where negatives are mined anew, the loader starts anew with them."""

    dataset, order = parts.data.dataset, parts.data.order
    if isinstance(dataset, Stream):
        return dataset.batches(
            plan.first_step, plan.total_steps, workers=config.data.workers, timeout=config.data.timeout
        )
    assert isinstance(order, Order)

    def load(dataset: BatchSource, first_step: int, last_step: int) -> Iterable[Batch]:
        return build_loader(
            dataset,
            order,
            rank=encode.world.rank,
            world_size=encode.world.size,
            first_step=first_step,
            last_step=last_step,
            workers=config.data.workers,
            timeout=config.data.timeout,
        )

    if not config.data.negatives.refresh_every:
        return load(dataset, plan.first_step, plan.total_steps)
    assert isinstance(dataset, QuestionPassage)
    refresh = Refresh(dataset, encode, run_folder(config), origin.resume, note)
    return refresh.batches(plan.first_step, plan.total_steps, load)


def _health(step: TrainStep, config: TrainConfig) -> dict[str, float]:
    """Diagnostics of the last step's embeddings, batch and loss. A collective."""
    cosine = config.objective.similarity is Similarity.cosine
    of_embeddings = diagnose(*step.embeddings, step.scalars.get("logit_scale"), cosine)
    return {**of_embeddings, **duplicates(*step.keys), **saturation(step.scalars)}


def _first_words(
    origin: Origin, start: Start, parts: Parts, plan: Plan, config: TrainConfig, world: World
) -> Iterator[str]:
    """Where the run begins, and what its reader should know before it does."""
    goal = f"{run_folder(config)}: {plan.total_steps} steps of {config.global_batch_size}"
    if start.state:
        seen = f", which has seen {start.state.facts['samples_seen']:,} samples" if start.counted_anew else ""
        more = f", with {start.more_samples:,} more samples" if start.more_samples else ""
        yield f"{goal}, going on at step {plan.first_step} from {origin.resume}{seen}{more}"
    else:
        yield f"{goal}, beginning with the weights of {origin.weights}" if origin.weights else goal
    if said := batch_norms(config, parts.model.towers, world.size):
        yield said
    yield from compared(config)
    if config.task is Task.question_passage and "excluded" not in OBJECTIVES[config.objective.name].takes:
        yield (
            f"objective={config.objective.name} takes pairs only: what is right for another question of the batch as "
            "well counts as its negative; clip, info_nce, dpr and siglip leave it out"
        )
    if isinstance(parts.data.dataset, Stream):
        left_off = start.state and start.state.facts["stream"]
        yield parts.data.dataset.begin(world.rank, world.size, config.data.workers, left_off)


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
    start: Start,
) -> Logger:
    state = start.state
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    with writable(folder):
        open_run(config)
        if start.counted_anew:
            put_aside(folder, COUNTED)
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


def _saves(config: TrainConfig, folder: Path, plan: Plan, logger: Logger, ledger: Ledger) -> Saves:
    def first() -> None:
        logger.flush()
        ledger.sync()

    return Saves(folder, config.checkpoint.keep, first=first, next_save=plan.next_save, say=logger.print)


def _begin_count(plan: Plan, save: Callable[[int, bool, bool], None], folder: Path, world: World) -> None:
    """Steps are of another size from here on: a checkpoint that says so, and those of the old count put aside. Killed
    in between, the run finds one of them and goes on at the same samples."""
    save(plan.first_step, plan.evaluation_owed, True)

    def leave_behind() -> None:
        others = [step for step in reversed(checkpoint.steps(folder)) if step != plan.first_step]
        with writable(folder):
            put_aside(folder, [f"checkpoints/{checkpoint.name(step)}" for step in others])

    rank_0_only(world, leave_behind)


def _of_stream(parts: Parts, world: World) -> dict[str, Any] | None:
    """How far the ranks are with what they stream. A collective."""
    stream = parts.data.dataset
    return stream.state(lambda progress: gather_objects(progress, world)) if isinstance(stream, Stream) else None


def _saver(
    config: TrainConfig,
    parts: Parts,
    saves: Saves,
    watch: Watch,
    substituted: Substituted,
    logger: Logger,
    world: World,
) -> Callable[[int, bool, bool], None]:
    def save(step: int, evaluation_owed: bool, last: bool) -> None:
        watch.compare(step)
        substituted.tell()
        facts = {
            **identity(parts, config),
            "samples_seen": step * config.global_batch_size,
            "evaluation_owed": evaluation_owed,
            "wandb_id": logger.wandb_id,
            "world_size": world.size,
            "threads": torch.get_num_threads(),
            "step_state": parts.step.state_dict(),
            "substituted": substituted.state_dict(),
            "stream": _of_stream(parts, world),
        }
        saves.wait()
        memory = parts.memory.gathered(world.device) if parts.memory else None

        def write() -> None:
            state = checkpoint.capture(parts.modules, parts.step.optimizer, step, facts, memory)
            (saves.now if last else saves.behind)(state)

        rank_0_only(world, write)

    return save
