"""One training run from its configuration: build the components, restore them where the run stopped, train."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from dyad.data.base.errors import Preempted
from dyad.data.config import Mode
from dyad.data.loading.loader import worker_count
from dyad.eval.encode.encoder import Encoder
from dyad.eval.results.write import print_tables
from dyad.run.class_names import resolve_classes
from dyad.run.components import build_components
from dyad.run.evaluation import Evaluation
from dyad.run.hardware import describe_hardware, explain_device_errors, resolve_precision
from dyad.run.indexing import index_shares
from dyad.run.resume import lock_and_find, restore_components, verify_source
from dyad.train.config import TrainConfig
from dyad.train.config_rules import validate
from dyad.train.distributed.agreement import from_rank_0, raise_on_all, rank_0_only
from dyad.train.distributed.consistency import check_same_config, code_digest
from dyad.train.distributed.failures import report_failures
from dyad.train.distributed.signals import StopRequest
from dyad.train.distributed.world import World, any_rank, gather_objects, patient_at_first
from dyad.train.monitor.postmortem import record_allocations
from dyad.train.monitor.profiler import traced
from dyad.train.monitor.stragglers import LocalTimer
from dyad.train.monitor.telemetry import Telemetry
from dyad.train.run_folder.folder import (
    CONFIG,
    SINCE_BEST,
    all_keys,
    origin_run,
    recorded_activation,
    recorded_caption_per,
    run_folder,
    write_config,
)
from dyad.train.run_folder.ledger import Ledger
from dyad.train.run_folder.run_state import RunState
from dyad.train.run_folder.saving import CheckpointWriter
from dyad.train.step.loop import fit
from dyad.train.tracking.logger import Logger
from dyad.train.tracking.wandb_mode import resolve_wandb_mode
from dyad.training_run import TrainingRun


def train_run(world: World, config: TrainConfig) -> None:
    """Train as the configuration says. Every rank must call it, in a process group (`world`).

    It builds the components, restores them where the run stopped, trains, writes the report if the run is finished, and
    prints the last results on rank 0. Nothing is written into the run folder before all components are built, so a
    mistake that is found while building leaves no run folder. Raises Preempted when a stop was requested, after a last
    checkpoint; ConfigError also if ranks differ in configuration, code or data.
    """
    # Every rank must have the same configuration, code and data, except for these keys, which depend on the machine.
    may_differ = {"model.frozen_cache_mb", "data.workers"}
    must_match = {key: value for key, value in all_keys(config).items() if key not in may_differ}
    if config.data.mode is Mode.stream:  # the order of a stream's samples depends on the number of workers
        must_match["data.workers"] = config.data.workers
    check_same_config(world, {**must_match, "torch": torch.__version__, "code": code_digest()})
    validate(config, world.size)
    folder = run_folder(config)
    requested_precision, config = config.precision, resolve_precision(config, folder, world)
    activation = from_rank_0(world, lambda: recorded_activation(config))
    data = replace(config.data, caption_per=from_rank_0(world, lambda: recorded_caption_per(config)))
    config = replace(config, model=replace(config.model, activation=activation), data=data)
    if config.data.mode is Mode.stream:  # auto may give more workers on one machine than on another
        min_workers = min(gather_objects(worker_count(config.data.workers, world.device), world))
        config = replace(config, data=replace(config.data, workers=min_workers))
    tracking = from_rank_0(world, lambda: resolve_wandb_mode(config.tracking, folder, print))
    index_shares(config, world)
    config = resolve_classes(config, world)
    origin = from_rank_0(world, lambda: origin_run(config))
    components = build_components(config, world, origin)
    check_same_config(world, {"data": components.data.fingerprint})
    with ExitStack() as stack:
        # Where the run begins
        source = from_rank_0(world, lambda: lock_and_find(config, folder, stack, origin))
        verify_source(source, world)
        restored = raise_on_all(world, lambda: restore_components(source, components, config))
        run = TrainingRun(config, world, folder, components, source, restored)
        schedule = run.schedule

        # What it writes; rank 0 alone
        hosts = gather_objects(socket.gethostname(), world)
        logger = stack.enter_context(rank_0_only(world, lambda: run.open_logger(tracking)) or Logger())
        log = logger.print
        for line in (*describe_hardware(config, world, requested_precision), *run.describe(), *run.begin_stream()):
            log(line)
        length = schedule.first_step, schedule.total_steps
        run_state = stack.enter_context(RunState(folder, *length, world.rank, hosts, source.named))
        stop = stack.enter_context(StopRequest())

        def before_save() -> None:  # a resume must find the configuration, and the record of every step
            if not (folder / CONFIG).exists():
                log(f"{folder / CONFIG} was deleted while the run trains: it is written again")
                write_config(config)
            logger.flush()
            ledger.sync()

        encoder = Encoder.of(config, components.model, world, lambda: any_rank(stop.requested, world))
        encoder = replace(encoder, weights=components.step.average.applied)
        cut = replace(encoder, width=config.eval.width)
        ledger = stack.enter_context(Ledger(folder if world.rank == 0 else None, schedule.first_step, log))
        monitor = run.build_monitor(ledger, log)
        keep, keep_every, after_save = config.checkpoint.keep, config.checkpoint.keep_every, run_state.write_running
        writer = CheckpointWriter(folder, keep, before_save, schedule, log, keep_every, after_save)
        stack.enter_context(writer)
        best = run.build_best(writer, log)

        def may_be_last(step: int) -> bool:
            return step == schedule.total_steps or best.may_end(step)

        evaluation = Evaluation(components.evaluators, cut, folder, may_be_last, config.eval.examples, log)
        save = partial(run.save, writer, monitor, logger, best)

        # Train
        copy_timer = LocalTimer(world.device)
        telemetry = Telemetry(components.unsharded, config.precision, copy_timer, world)
        take_step = partial(
            components.step, stop_requested=lambda: stop.requested, logs=schedule.logs, on_skip=monitor.record_skipped
        )
        if config.profile:
            profile_args = (folder / "profile", world.rank, telemetry.once.update, log)
            take_step = stack.enter_context(traced(take_step, config.profile, *profile_args))
        if config.tracking.postmortem and world.device.type == "cuda":
            record_allocations(folder, world.rank)
        stack.enter_context(report_failures(world, lambda: components.step.stage))
        stack.enter_context(explain_device_errors(config, world))
        patient = partial(patient_at_first, first=config.dist.seconds_to_start, later=config.dist.timeout)
        monitor.verify(schedule.first_step)
        if restored.batch_changed:
            run.renumber_checkpoints(save, log)
        status, step = fit(
            schedule,
            run.batches(encoder, copy_timer, log),
            step=patient(take_step),
            monitor=monitor,
            diagnose=run.diagnose,
            evaluate=patient(evaluation),
            save=save,
            should_stop=lambda: components.step.stopping,
            logger=logger,
            telemetry=telemetry,
            is_best=best,
            ends=best.patience_is_used_up,
        )

        # How it ended
        ended_early = best.patience_is_used_up(step) and step < schedule.total_steps
        early = {SINCE_BEST: len(best.later)} if ended_early else {}
        run_state.write(status, step, checkpoint_seconds=round(writer.seconds, 3), best=best.known(step), **early)
        if ended_early:
            log(best.describe_end(step))
        if bad := monitor.bad_samples.total:
            log(f"{bad:,} samples could not be used, others took their place: {ledger.path}")
        command = f"the same command{' without resume=never' * (config.resume.mode == 'never')}"
        then = f"; {command} goes on from there" if status == "preempted" else ""
        for line in (f"{status} at step {step}: {folder}{then}", *best.describe(step)):
            log(line)
        if status == "finished":
            evaluation.conclude(logger, config.tracking.report)
    print_tables(evaluation.results)
    if status == "preempted":
        raise Preempted
