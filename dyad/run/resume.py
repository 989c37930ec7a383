"""Find where a run begins: with new weights, with the weights of another run, or where a checkpoint was written.

A resumed run continues at the same number of samples: its next step is the number of samples seen, divided by
global_batch_size and rounded down. data/loading/order.py computes the epoch and the samples of that step. With another
batch size (resume.allow_batch_change), `steps`, warm-up and all intervals count steps of the new size, `epochs` stay
passes over the data, and at most (new batch size - 1) samples are seen a second time. With files added behind the old
ones (resume.allow_more_data), an epoch is a pass over all of them. In both cases the rest of the current epoch is drawn
anew, since the order of an epoch depends on its number of whole batches. The number of ranks may change:
data/loading/order.py divides the samples, train/run_folder/checkpoint.py the tensors, `Stream.begin` the shards.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.files import write_errors
from dyad.data.base.limits import MOST
from dyad.data.config import ItemKind
from dyad.data.shards import manifest
from dyad.evaluation.load_run import read_config
from dyad.run.calibrate import calibrate
from dyad.run.components import Components
from dyad.train.cli.also import auxiliary_configs
from dyad.train.config import TrainConfig
from dyad.train.distributed.world import World
from dyad.train.losses.objectives.base import Objective
from dyad.train.run_folder import checkpoint
from dyad.train.run_folder.best_record import Best
from dyad.train.run_folder.checkpoint import Checkpoint
from dyad.train.run_folder.checkpoint_state import CheckpointState, restore
from dyad.train.run_folder.digests import once_a_machine
from dyad.train.run_folder.folder import RESUMED_FROM, check_run, folder_of, recorded_state, resume_mode, run_of
from dyad.train.run_folder.locate import locate
from dyad.train.run_folder.named_tensors import restore_weights
from dyad.train.run_folder.run_state import locked_folder
from dyad.train.towers.libraries.calibration import Calibration

Count = Annotated[int, Field(ge=0, le=MOST)]


class StepState(TypedDict):
    """The state of the training step, as `TrainStep.state_dict` returns it.

    scaler: the state of the gradient scaler of fp16. skipped: numbers of skipped steps, in all and in a row. losses:
    recent losses. trust_from: the first step that may again assume conditions (train/losses/sums/conditions.py) instead
    of reading them. averaged: how often the weight average of optim.ema was updated.
    """

    scaler: dict[str, float]
    skipped: Annotated[list[Count], Field(min_length=2, max_length=2)]
    losses: list[float]
    trust_from: NotRequired[Count]
    averaged: NotRequired[Count]


class ReplacedSamples(TypedDict):
    """Samples that could not be used and were replaced, as `BadSampleCounter.state_dict` returns them.

    Positions are numbers of samples in the order of training. total: how many bad samples the run has had. row: how
    many directly follow each other, counted back from the last one. last: the position of the last one, -1 if there is
    none. recent: the positions of bad samples within the newest samples (a window of fixed length).
    """

    total: Count
    row: Count
    last: Annotated[int, Field(ge=-1, le=MOST)]
    recent: list[Count]


class StreamState(TypedDict):
    """How far a stream was read, as `Stream.state` returns it.

    The shards that are read are numbered 0, 1, … in their order. first: all shards before this number are finished.
    through: numbers of later finished shards. taken: (number of a shard, samples used from it) for shards that are read
    in part.
    """

    first: Count
    through: list[Count]
    taken: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]


class ResumeMetadata(TypedDict):
    """The entries of a checkpoint's state.json that a resumed run needs, with their types, to validate them.

    data: the files of the training data, as `summary` (data/shards/manifest.py) returns them. evaluation_owed: whether
    the evaluation of the checkpoint's step is still to be done. substituted: samples that were replaced. best: the best
    evaluation so far; None if there is none.
    """

    seed: int
    global_batch_size: Annotated[Count, Field(ge=1)]
    samples_seen: Count
    data_fingerprint: str
    data: dict[str, Any]
    evaluation_owed: bool
    wandb_id: str | None
    step_state: StepState
    substituted: ReplacedSamples
    stream: NotRequired[StreamState | None]
    best: NotRequired[Best | None]


OTHERWISE = "Use the same data and batch, or start another run.name with init_from"


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoint folder that a run starts from, if any: at most one of `resume` and `weights` is not None.

    resume: the run continues where this checkpoint was written. weights: only the weights of the towers are taken from
    this checkpoint (init_from). named: the checkpoint that resume= named when the run began there, for run_state.json;
    None if the run began in another way. A run that has gone on since has a later checkpoint as `resume`.
    """

    resume: Path | None = None
    weights: Path | None = None
    named: str | None = None


@dataclass(frozen=True)
class RestoredState:
    """The state that a resumed run takes from its checkpoint; the default values are those of a new run.

    step: the next optimiser step. metadata: the entries of the checkpoint's state.json. batch_changed: whether the
    steps before the checkpoint had another batch size. more_samples: how many training samples were added since the
    checkpoint. notes: lines for the log on what the run takes from the weights of init_from.

    An object whose state is an entry of state.json is registered by `register`; `states` then returns its state for a
    new checkpoint.
    """

    step: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    batch_changed: bool = False
    more_samples: int = 0
    notes: Sequence[str] = ()
    _state_of: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def register(self, entry: str, state: Callable[[], Any]) -> Any:
        """Register an entry of state.json: future checkpoints save what `state` returns.

        Return the entry in the checkpoint that the run resumes; None in a new run, and if the checkpoint lacks it.
        """
        self._state_of[entry] = state
        return self.metadata.get(entry)

    def states(self) -> dict[str, Any]:
        """Return entry → state, for all registered objects. Every rank must call it."""
        return {entry: state() for entry, state in self._state_of.items()}


def lock_and_find(config: TrainConfig, folder: Path, stack: ExitStack, origin: Path | None = None) -> ResumeSource:
    """Lock the run folder until `stack` closes, and find the checkpoint to start from. Rank 0 alone calls it.

    The folder is made if it does not exist, and saves that were killed half-way are cleaned up (`tidy` in
    train/run_folder/checkpoint.py). The keys `resume` and `init_from` choose the checkpoint; a new run has none. If
    `resume` names the checkpoint at which the run in the folder began, that run's own newest checkpoint is taken.
    Prints a line for each damaged checkpoint that is passed over. origin: the run for which `build_components` left out
    pretrained weights. Raises ConfigError if the folder cannot be made or is in use, or has a run of another
    configuration, or if there is an `origin` and no checkpoint; HardwareError if it cannot be written; and the errors
    of `locate` (train/run_folder/locate.py) if there is no such checkpoint or no undamaged one.
    """
    with write_errors(folder):
        stack.enter_context(locked_folder(folder))
        check_run(config)
        checkpoint.tidy(folder)
    mode = resume_mode(config)
    if mode not in ("auto", "never"):
        return ResumeSource(locate(Path(mode), print), named=str(Path(mode)))
    if mode == "auto" and (resume := checkpoint.find_undamaged(folder, print)):
        return ResumeSource(resume, named=recorded_state(folder).get(RESUMED_FROM))
    if config.init_from is None:
        if origin:  # the towers have random weights
            raise ConfigError(f"{origin}: its checkpoints were removed while the run started. Start it again")
        return ResumeSource()
    return ResumeSource(weights=locate(Path(config.init_from), print))


def verify_source(source: ResumeSource, world: World) -> None:
    """Verify the SHA-256 digests of the checkpoint of `source` once on each machine. Every rank must call it.

    `restore_components` then need not compute them again on each rank. Of a checkpoint that gives only weights, only
    the files of weights are verified. Without a checkpoint nothing is verified. Raises, on all ranks, DataError for a
    damaged checkpoint, ConfigError for another format version.
    """

    def verify() -> None:
        if source.resume:
            Checkpoint(source.resume).verify()
        elif source.weights:
            Checkpoint(source.weights).verify(*checkpoint.OF_WEIGHTS)

    once_a_machine(world, verify)


def restore_components(source: ResumeSource, components: Components, config: TrainConfig) -> RestoredState:
    """Load the checkpoint of `source` into the components, with the state of the training step.

    Returns the restored state; for a new run, that of step 0. The state of the training step is also registered for
    future checkpoints. Call it on every rank, after `verify_source`. Raises ConfigError for a checkpoint of another
    model; if the run is resumed, also for one of another seed or data, and if the run may not continue from it (see
    `_next_step`). Raises DataError for a damaged checkpoint.
    """
    restored = _restore_tensors(source, components, config)
    if state := restored.register("step_state", components.step.state_dict):
        components.step.load_state_dict(state)
    return restored


def _restore_tensors(source: ResumeSource, components: Components, config: TrainConfig) -> RestoredState:
    """Load the checkpoint of `source` into the components of the run, and return the state that the run continues from.

    Without a checkpoint, nothing is loaded and the state is that of a new run. If `source` gives only weights, those
    of the towers are loaded, the objective starts at their temperature and bias as config.from_weights says, and the
    run starts at step 0; seed and data may differ. Raises ConfigError, before any weight is changed, for a checkpoint
    of another model; if the run is resumed, also for one of another seed or data, and as `_next_step` and
    `_more_samples` do. Raises DataError for a damaged checkpoint.
    """
    notes: list[str] = []
    if source.weights:
        try:
            weights = Checkpoint(source.weights).weights()
            restore_weights(weights, {"towers": components.modules["towers"]})
        except ConfigError as error:
            raise ConfigError(f"init_from={source.weights}: {error}") from error
        if (run := run_of(source.weights)) is None:
            notes = [f"init_from={source.weights}: no run is there, so its weights are taken to be of the model typed"]
        else:
            known = Calibration.of_run(f"init_from={source.weights}", weights, read_config(run).objective)
            notes = calibrate(config, cast(Objective, components.step.terms[0].objective), known)
        components.step.target.load({})
    if (folder := source.resume) is None:
        return RestoredState(notes=notes)
    state = Checkpoint(folder).read()
    metadata = state.metadata
    check_metadata(folder, state)
    if metadata["seed"] != config.seed:
        raise ConfigError(
            f"{folder} was trained with seed={metadata['seed']}, now {config.seed}: the order of samples would "
            f"differ. {OTHERWISE}"
        )
    more_samples = _more_samples(folder, metadata, components, config)
    step = _next_step(folder, state.step, metadata, components, config)
    try:
        if (components.sample_state is None) != (not state.sample_state):
            raise ConfigError(
                f"it has {'' if state.sample_state else 'no '}per-sample state: it is of another objective. For its "
                f"towers alone, start another run.name with init_from={folder}"
            )
        if components.sample_state:
            components.sample_state.load(state.sample_state, more_samples=config.resume.allow_more_data)
        average, target = restore(state, components.modules, components.step.optimizer)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    components.step.average.tensors = {} if config.optim.ema is None else average
    components.step.target.load(target)
    return RestoredState(step, metadata, metadata["global_batch_size"] != config.global_batch_size, more_samples)


def check_metadata(folder: Path, state: CheckpointState) -> None:
    """Raise DataError if the entries of a checkpoint's state.json have wrong types, or contradict each other.

    They contradict each other if samples_seen is not the number of steps times the batch size. folder: the checkpoint,
    which may be untrusted: resume= can name any folder. state: its content.
    """
    metadata = state.metadata
    try:
        TypeAdapter(ResumeMetadata).validate_python(metadata, strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{folder} is no checkpoint of ours: {key:.80}: {first['msg']}") from error
    if (seen := metadata["samples_seen"]) != state.step * metadata["global_batch_size"]:
        raise DataError(f"{folder} is no checkpoint of ours: samples_seen is {seen:,} after {state.step:,} steps")


def best_of_resumed(
    source: ResumeSource, restored: RestoredState, folder: Path, log: Callable[[str], None]
) -> list[Best]:
    """Return a list with the best evaluation that the checkpoint of a resumed run records, for BestCheckpoint.found.

    The list is empty for a new run, and if there is no best, or if it is lost: its checkpoint is not in the run folder,
    or counts steps of another batch size. folder: the run folder. log: called with a line if it is lost.
    """
    best: Best | None = restored.metadata.get("best")
    if best is None or source.resume is None:
        return []
    is_here = source.resume.resolve().parent.parent == folder.resolve() and not restored.batch_changed
    if is_here and folder_of(folder, best["step"]).is_dir():
        return [best]
    log(f"the best so far, step {best['step']}, is no checkpoint of this run any more: the best from here on is kept")
    return []


def _next_step(folder: Path, step: int, metadata: dict[str, Any], components: Components, config: TrainConfig) -> int:
    """Return the step at which the run continues, counted in batches of this run's size.

    folder: the checkpoint; step: its count of finished steps, in batches of its own size; metadata: the entries of its
    state.json; components: the components of the run. Raises ConfigError if the run is to have fewer steps than it has
    already. When the batch size has changed, raises ConfigError if resume.allow_batch_change is not set, if the run
    ends at or before the returned step, or if hard negatives are mined every data.negatives.refresh_every steps and the
    returned step is no multiple of that.
    """
    before, now, seen = metadata["global_batch_size"], config.global_batch_size, metadata["samples_seen"]
    if before == now and step > components.total_steps:
        raise ConfigError(
            f"{folder} has {step:,} steps behind it, more than the {components.total_steps:,} that steps or epochs "
            "asks for. Ask for more, or choose another run.name; resume=never begins again"
        )
    if before == now:
        return step
    if not config.resume.allow_batch_change:
        raise ConfigError(
            f"{folder} was trained with global_batch_size={before}, now {now}.\n"
            "resume.allow_batch_change=true goes on at the same number of samples; or use the old batch"
        )
    step = seen // now
    counted = f"{folder} has seen {seen:,} samples: {step:,} steps of global_batch_size={now}"
    if step >= components.total_steps:
        raise ConfigError(
            f"{counted}, and the run ends after {components.total_steps:,}. Set steps or epochs to go further"
        )
    if (every := config.data.negatives.refresh_every) and step % every:
        raise ConfigError(
            f"{counted}, inside a segment of data.negatives.refresh_every={every}. Set it to a divisor of {step}: "
            "negatives are mined at its borders"
        )
    return step


def _more_samples(folder: Path, metadata: dict[str, Any], components: Components, config: TrainConfig) -> int:
    """Return how many samples were added behind the old ones of data.train since the checkpoint.

    folder: the checkpoint. metadata: the entries of its state.json. components: has the present data. Raises
    ConfigError if something else in the data has changed, or if samples were added and resume.allow_more_data is not
    set; the message says what differs.
    """
    if metadata["data_fingerprint"] == components.data.fingerprint:
        return 0
    changes = manifest.changes(metadata["data"], components.data.manifest)
    kinds = [own.data.items for own in (config, *auxiliary_configs(config).values())]
    if ItemKind.frames in kinds and not (changes.different or changes.added):
        return 0  # fingerprints of older versions are without the values of frames
    if changes.different or not changes.added:
        shown = "".join(f"\n  {key}: {difference}" for key, difference in changes.different.items())
        raise ConfigError(
            f"{folder} was trained with other data (fingerprint {metadata['data_fingerprint'][:16]}, now "
            f"{components.data.fingerprint[:16]}):{shown}\n{OTHERWISE}"
        )
    if not config.resume.allow_more_data:
        shown = ", ".join(f"{count:,} samples to {key}" for key, count in changes.added.items())
        raise ConfigError(
            f"{folder} was trained with less data: added behind it, {shown}.\n"
            "resume.allow_more_data=true goes on with all of them; or use the old data"
        )
    return changes.added.get("data.train", 0)
