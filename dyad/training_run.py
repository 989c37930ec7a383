"""A training run whose components are built and restored: its log lines, batches, diagnostics and checkpoints."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from dyad.data.base.files import write_errors
from dyad.data.batch import Batch, with_auxiliary
from dyad.data.image_text.stream import Stream
from dyad.data.loading.ahead import copied_ahead
from dyad.data.loading.loader import BatchSource, build_loader, worker_count
from dyad.data.loading.order import Order
from dyad.data.question_passage.dataset import QuestionPassage
from dyad.data.shards import manifest
from dyad.data.shards.sources import written_sources
from dyad.eval.encode.encoder import Encoder
from dyad.run.best_checkpoint import BestCheckpoint, evaluations_since, rankable_metrics
from dyad.run.calibrate import describe_inputs
from dyad.run.components import Components, describe_batch_norms
from dyad.run.mining_refresh import NegativeRefresh
from dyad.run.resume import RestoredState, ResumeSource, best_of_resumed
from dyad.train.config import Task, TrackingConfig, TrainConfig
from dyad.train.distributed.agreement import from_rank_0, only_on, rank_0_only
from dyad.train.distributed.sharding import describe_layers, shard_size
from dyad.train.distributed.world import World, gather_objects
from dyad.train.losses.diagnostics import diagnose, duplicates, saturation
from dyad.train.losses.options.choices import Partition, Similarity
from dyad.train.monitor.bad_samples import BadSampleCounter
from dyad.train.monitor.monitor import Monitor
from dyad.train.monitor.stragglers import LocalTimer, Stragglers
from dyad.train.run_folder.checkpoint_state import capture
from dyad.train.run_folder.folder import (
    STEP_FILES,
    open_run,
    plain,
    put_aside,
    put_checkpoints_aside,
    recorded_state,
    run_of,
    steps,
)
from dyad.train.run_folder.ledger import Ledger
from dyad.train.run_folder.saving import CheckpointWriter, refuse_full_disk
from dyad.train.run_schedule import RunSchedule
from dyad.train.step.schedule import describe_schedule
from dyad.train.towers.libraries.sentence_transformers import describe_choices
from dyad.train.tracking.logger import Logger, build_logger

MUCH = 0.05  # a larger share of samples that an epoch leaves out gives a line
MANY_WEIGHTS = 40_000_000  # more trained weights than this on a CPU give a warning; MiniLM has 23 million


@dataclass(frozen=True)
class TrainingRun:
    """A training run whose components are built and restored. `train_run` (dyad/run/train_run.py) calls its methods.

    folder: the run folder. source: the checkpoint that the run resumes, or the weights that it starts from, if any.
    restored: the state that was taken from the checkpoint.
    """

    config: TrainConfig
    world: World
    folder: Path
    components: Components
    source: ResumeSource
    restored: RestoredState

    @cached_property
    def schedule(self) -> RunSchedule:
        """The first and last step of the run, and the intervals of logs, evaluation and checkpoints."""
        config, restored = self.config, self.restored
        return RunSchedule(
            first_step=restored.step,
            total_steps=self.components.total_steps,
            global_batch_size=config.global_batch_size,
            world_size=self.world.size,
            log_every=config.tracking.every,
            evaluate_every=config.eval.every if self.components.evaluators else None,
            save_every=config.checkpoint.every,
            evaluation_owed=restored.metadata.get("evaluation_owed", False),
            steps_per_epoch=self.components.data.order.steps_per_epoch,
        )

    def open_logger(self, tracking: TrackingConfig) -> Logger:
        """Open the run folder, its logs and the trackers, and return the Logger. Rank 0 alone calls it.

        config.yaml is written, and files of an earlier run are put aside as `open_run` (train/run_folder/folder.py)
        does. If the batch size has changed, STEP_FILES of that module are put aside too, because their steps count
        batches of the old size. A run that goes on in its folder keeps its W&B run. tracking: the options of the
        trackers. Raises HardwareError if the disk has no room for a checkpoint, or the folder cannot be written.
        """
        step, samples = self.components.step, self.components.sample_state
        averaged, per_sample = self.config.optim.ema is not None, samples.nbytes if samples else 0
        target = step.target.tensors.values()
        content = self.components.modules, step.optimizer, averaged, target, per_sample
        notes = refuse_full_disk(self.folder, *content, self.config.checkpoint.keep)
        with write_errors(self.folder):
            open_run(self.config, self.source.resume, notes.append)
            if self.restored.batch_changed:
                put_aside(self.folder, STEP_FILES, notes.append)
            resumed = run_of(self.source.resume) if self.source.resume else None
            is_same = resumed is not None and resumed.resolve() == self.folder.resolve()  # another run, another id
            wandb_id = self.restored.metadata.get("wandb_id") if is_same else None
            logger = build_logger(self.folder, tracking, self.schedule, plain(self.config), wandb_id)
        for line in notes:
            logger.print(line)
        return logger

    def describe(self) -> Iterator[str]:
        """Yield lines for the log: where the run begins, then notes on its model, objective and data.

        Iterate it before run_state.json is written for this start, because the earlier total_steps is read from that
        file.
        """
        config, restored = self.config, self.restored
        line = f"{self.folder}: {self.schedule.total_steps} steps of {config.global_batch_size}"
        if self.source.resume:
            seen = f", which has seen {restored.metadata['samples_seen']:,} samples" if restored.batch_changed else ""
            more = f", with {restored.more_samples:,} more samples" if restored.more_samples else ""
            line += f", going on at step {self.schedule.first_step} from {self.source.resume}{seen}{more}"
        elif self.source.weights:
            line += f", beginning with the weights of {self.source.weights}"
        yield line
        if isinstance(order := self.components.data.order, Order) and order.left_out > MUCH:
            rest = f"{order.left_out:.0%} of its {order.samples_per_epoch:,} samples"
            yield f"an epoch leaves out {rest}, which fill no batch; each epoch leaves out others"
        written = written_sources(config.data.train, "data.train")
        if any(source.question_prefix is not None or source.passage_prefix is not None for source in written):
            yield "prefixes of sources: for training and mining; evaluation and exports take data.*.prefix"
        trained = sum(p.numel() for p in self.components.model.towers.parameters() if p.requires_grad)
        if self.world.device.type == "cpu" and trained > MANY_WEIGHTS:
            yield (
                f"{trained / 1e6:.0f} million weights train on CPUs: seconds to minutes a step. For a first try take "
                "model=tiny_clip_gn, for texts model=minilm"
            )
        begun = recorded_state(self.source.resume.resolve().parent.parent) if self.source.resume else {}
        total_before = None if restored.batch_changed else begun.get("total_steps")
        options = self.components.step.terms[0].objective.options
        yield from describe_schedule(config, self.schedule, options, total_before)
        norms = describe_batch_norms(config, self.components.model.towers, self.world.size)
        yield from filter(None, [norms, str(self.components.data.drawn or "")])
        yield from describe_layers(self.components.unsharded, shard_size(config.dist, self.world.size))
        yield from describe_choices(config)
        yield from describe_inputs(config, self.components.model)
        yield from [] if self.source.resume else (*self.components.notes, *restored.notes)
        for name, loss in self.components.auxiliary.items():
            own = loss.config
            what = f"task={own.task.value} objective={own.objective.name}, {own.global_batch_size} a step"
            yield f"also.{name}: {what}, its loss counts {own.weight:g} times"
        if config.data.rare is None and (classes := config.run.classes):
            yield f"data.label={config.data.label}: {len(classes):,} classes, the first is {classes[0]}"
            if config.objective.name == "cross_entropy" and config.objective.partition is Partition.mean:
                yield (
                    f"objective=cross_entropy: the loss is the cross-entropy less log {len(classes):,}, 0 by chance; "
                    "objective=cross_entropy_sum has the same gradient, and the cross-entropy as its loss"
                )
        objective = config.objective
        if config.task is Task.question_passage and objective.inputs == "pairs" and "excluded" not in objective.takes:
            yield (
                f"objective={objective.name} takes pairs only: what is right for another question of the batch "
                "as well counts as its negative; clip, info_nce, dpr and siglip leave it out"
            )

    def begin_stream(self) -> list[str]:
        """Set the stream of samples to where the run begins; return a list with one text for the log.

        For training data that are not a stream, nothing is done, and the result is []. The stream is divided among the
        loader processes of all ranks. A resumed run continues at the place in its checkpoint: shards that were read in
        part begin anew. The state of the stream is registered, so that checkpoints store it. Every rank must call it
        before `batches`.
        """
        stream, world = self.components.data.dataset, self.world
        if not isinstance(stream, Stream):
            return []
        state = self.restored.register("stream", partial(stream.state, partial(gather_objects, world=world)))
        return [stream.begin(world.rank, world.size, worker_count(self.config.data.workers, world.device), state)]

    def build_monitor(self, ledger: Ledger, log: Callable[[str], None]) -> Monitor:
        """Build the monitor, which watches for slow ranks, bad samples and weights that differ.

        It also records skipped steps. Checkpoints store its count of bad samples, and in a resumed run it continues the
        count of the checkpoint. ledger: the run's event file. log: called with each line that the monitor prints.
        """
        config, world, step = self.config, self.world, self.components.step
        stragglers = Stragglers(step.local_timer, config.dist.slow_rank, world, log)
        sizes = [term.config.global_batch_size for term in step.terms]
        bad_samples = BadSampleCounter(config.data, sizes, world, ledger, log)
        monitor = Monitor(
            stragglers,
            bad_samples,
            self.components.modules,
            config.dist.digest_every,
            ledger,
            world,
            log,
            shard_size(config.dist, world.size),
        )
        if state := self.restored.register("substituted", bad_samples.state_dict):
            bad_samples.load_state_dict(state)
        return monitor

    def build_best(self, writer: CheckpointWriter, log: Callable[[str], None]) -> BestCheckpoint:
        """Build the BestCheckpoint, which finds the best checkpoint of the run and may end the run early.

        In a resumed run, it starts with the best that the checkpoint recorded (`best_of_resumed`) and, with
        checkpoint.patience, with the evaluations since then. Every rank must call it, after rank 0 has opened the
        logger, which removes later records from metrics.jsonl. writer: writes the checkpoints. log: called with each
        line to print.
        """
        metric, found = self.config.checkpoint.best, best_of_resumed(self.source, self.restored, self.folder, log)
        higher = rankable_metrics(self.components.evaluators).get(metric or "", True)
        patience, later = self.config.checkpoint.patience, ()
        if metric is not None and patience is not None:
            later = from_rank_0(self.world, lambda: evaluations_since(self.folder, metric, found))
        return BestCheckpoint(metric, higher, self.folder, self.world, writer.wait, log, found, patience, later)

    def batches(self, encoder: Encoder, copy_timer: LocalTimer, log: Callable[[str], None]) -> Iterable[Batch]:
        """Return an iterable of this rank's batches on its device, one for each step that the run still takes.

        If there are auxiliary losses, each batch also holds their batches, in Batch.auxiliary. With
        data.negatives.refresh_every, hard negatives are mined with `encoder` between the batches, so every rank must
        iterate. copy_timer: measures the time of copies to a GPU. log: called with lines about the mining.
        """
        config, schedule, data = self.config, self.schedule, self.components.data
        dataset, order = data.dataset, data.order
        workers, on_gpu = worker_count(config.data.workers, self.world.device), self.world.device.type == "cuda"
        options: dict[str, Any] = {"workers": workers, "timeout": config.data.timeout, "noise_later": on_gpu}
        ahead = partial(copied_ahead, device=self.world.device, timer=copy_timer)
        if isinstance(dataset, Stream):
            return dataset.batches(schedule.first_step, schedule.total_steps, ahead=ahead, **options)
        assert isinstance(order, Order)
        loader = partial(build_loader, rank=self.world.rank, world_size=self.world.size, **options)

        def load(dataset: BatchSource, order: Order = order, **how: Any) -> Iterator[Batch]:
            return ahead(loader(dataset, order, **how))

        steps: dict[str, Any] = {"first_step": schedule.first_step, "last_step": schedule.total_steps}
        if config.data.negatives.refresh_every:
            assert isinstance(dataset, QuestionPassage)
            refresh = NegativeRefresh(dataset, encoder, self.folder, self.source.resume, log)
            own = refresh.batches(**steps, load=load)
        else:
            own = load(dataset, **steps, drawn=data.drawn)
        auxiliary: list[Any] = [of.data for of in self.components.auxiliary.values()]
        others = [load(data.dataset, data.order, **steps) for data in auxiliary]
        return map(with_auxiliary, own, *others) if others else own

    def diagnose(self) -> dict[str, float]:
        """Return diagnostics of the last step, name → value (see train/losses/diagnostics.py).

        Which ones there are depends on the task and the objective. Every rank must call it, after a step.
        """
        own, scalars, options = self.components.step.terms[0], self.components.step.scalars, self.config.objective
        if own.pairs is None:  # rows of x and y are no pairs
            return saturation(scalars)
        cosine, compared = options.similarity is Similarity.cosine, options.inputs != "scored pairs"
        of_embeddings = diagnose(*own.embeddings, scalars.get("logit_scale"), cosine, compared)
        twins = duplicates(*own.keys) if compared else {}
        return {**of_embeddings, **twins, **saturation(scalars)}

    def save(
        self,
        writer: CheckpointWriter,
        monitor: Monitor,
        logger: Logger,
        best: BestCheckpoint,
        step: int,
        evaluation_owed: bool,
        last: bool,
    ) -> None:
        """Write a checkpoint after `step` steps. Every rank must call it.

        Rank 0 writes it with `writer`; if the towers are sharded, each rank of the first copy of the weights writes a
        part. First, `monitor` checks that all ranks have equal weights (not with dist.digest_every=0) and that bad
        samples are not too many; otherwise it raises HardwareError or DataError. logger: gives the W&B run id to store.
        best: gives the best checkpoint so far. evaluation_owed: whether the evaluation of this step is still to be
        done. last: whether to return only when the checkpoint is on the disk, instead of writing in the background.
        """
        world, components, trained = self.world, self.components, self.components.step
        monitor.verify(step)
        metadata = {
            "data_fingerprint": components.data.fingerprint,
            "data": manifest.summary(components.data.manifest),
            "global_batch_size": self.config.global_batch_size,
            "seed": self.config.seed,
            "samples_seen": step * self.config.global_batch_size,
            "evaluation_owed": evaluation_owed,
            "wandb_id": logger.wandb_id,
            "world_size": world.size,
            "threads": torch.get_num_threads(),
            "stream": None,
            **self.restored.states(),
        }
        writer.wait()  # the thread may still read the per-sample state that is gathered next
        metadata["best"] = best.known(step)  # after the wait, as a checkpoint that could not be written does not count
        sample_state = components.sample_state.gathered(world.device) if components.sample_state else None

        # Of sharded towers, each rank of the first copy of the weights writes a part; a random name marks this attempt.
        size = shard_size(self.config.dist, world.size)
        part = None if size == 1 else (world.rank, size, from_rank_0(world, lambda: token_hex(4)))

        def write() -> None:
            averages = trained.average.tensors, trained.target.tensors
            state = capture(components.modules, trained.optimizer, step, metadata, sample_state, *averages, part)
            (writer.save if last else writer.save_in_background)(state)

        only_on(world, world.rank < size, write)

    def renumber_checkpoints(self, save: Callable[[int, bool, bool], None], log: Callable[[str], None]) -> None:
        """Write a checkpoint whose step counts batches of the new size, then put the older checkpoints aside.

        Call it on every rank, before the first step, when the batch size has changed. If the run is killed in between,
        its next start finds a checkpoint that counts batches of the old or of the new size, and continues at the same
        samples. save: the function save(step, evaluation_owed, last) that writes a checkpoint, such as `self.save` with
        its first arguments bound. log: called with a line that names the folder with the older checkpoints.
        """
        first_step = self.schedule.first_step
        save(first_step, self.schedule.evaluation_owed, True)
        older = {*steps(self.folder)} - {first_step}
        rank_0_only(self.world, lambda: put_checkpoints_aside(self.folder, older, log))
