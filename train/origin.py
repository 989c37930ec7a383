"""Where a run begins: with fresh weights, with those of another run, or where a checkpoint was written.

A run goes on as one that has had this batch and these data from its start would, at the same number of samples: step
⌊samples seen / global_batch_size⌋ is next, and data/order.py says which epoch that is and what it holds. So with
another batch (resume.allow_batch_change) `steps`, warm-up and all intervals count steps of the new size, `epochs` stay
passes over the data, and at most one new batch less one sample is seen a second time. With files added behind the old
ones (resume.allow_more_data) an epoch is a pass over all of them. The samples of the epoch that is under way are drawn
anew in both cases, since their order depends on how many whole batches an epoch has.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from data import manifest
from data.errors import ConfigError, DataError
from data.files import writable
from train.config import TrainConfig
from train.parts import Parts
from train.runs import checkpoint
from train.runs.checkpoint import CheckpointState
from train.runs.folder import check_run
from train.runs.run_state import claimed


class Facts(TypedDict):
    """What state.json says that a run goes on by."""

    seed: int
    global_batch_size: Annotated[int, Field(ge=1)]
    samples_seen: Annotated[int, Field(ge=0)]
    data_fingerprint: str
    data: dict[str, Any]
    evaluation_owed: bool
    wandb_id: str | None
    step_state: dict[str, Any]
    substituted: dict[str, Any]


OTHERWISE = "Use the same data and batch, or start another run.name with init_from"


@dataclass(frozen=True)
class Origin:
    """Where the first weights come from. resume: a checkpoint to go on from; weights: one whose weights to take."""

    resume: Path | None = None
    weights: Path | None = None


@dataclass(frozen=True)
class Start:
    """How the run begins. state: of the checkpoint that it goes on from, at the step that is next; counted_anew: its
    steps were of another size; more_samples: how many are new since then."""

    state: CheckpointState | None = None
    counted_anew: bool = False
    more_samples: int = 0


def claim(config: TrainConfig, folder: Path, stack: ExitStack) -> Origin:
    """Hold the run folder for as long as `stack` lives, and say where to begin. Rank 0 alone."""
    with writable(folder):
        stack.enter_context(claimed(folder))
        check_run(config)
        checkpoint.tidy(folder)
    mode, resume = config.resume.mode, None
    if mode != "never":
        resume = checkpoint.find(folder, print) if mode == "auto" else checkpoint.locate(Path(mode), print)
    if resume or config.init_from is None:
        return Origin(resume)
    return Origin(weights=checkpoint.locate(Path(config.init_from), print))


def bring_to(origin: Origin, parts: Parts, config: TrainConfig) -> Start:
    """The parts as `origin` has them."""
    if origin.weights:
        _take_weights(origin.weights, parts)
    return _restored(origin.resume, parts, config) if origin.resume else Start()


def identity(parts: Parts, config: TrainConfig) -> dict[str, Any]:
    """What fixes the order of samples, for a checkpoint."""
    return {
        "data_fingerprint": parts.data.fingerprint,
        "data": manifest.summary(parts.data.manifest),
        "global_batch_size": config.global_batch_size,
        "seed": config.seed,
    }


def _take_weights(found: Path, parts: Parts) -> None:
    """The towers, whole. What the objective has is configured: another's temperature or bias would win silently."""
    try:
        checkpoint.restore_weights(checkpoint.load_weights(found), {"towers": parts.modules["towers"]})
    except ConfigError as error:
        raise ConfigError(f"init_from={found}: {error}") from error


def _restored(found: Path, parts: Parts, config: TrainConfig) -> Start:
    """Bring the parts to the state of a checkpoint of this run on this data. Nothing is changed when it is refused."""
    state = checkpoint.load(found)
    try:
        TypeAdapter(Facts).validate_python(state.facts, strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise DataError(f"{found} is no checkpoint of ours: {first['loc'][0]}: {first['msg']}") from error
    if state.facts["seed"] != config.seed:
        raise ConfigError(
            f"{found} was trained with seed={state.facts['seed']}, now {config.seed}: the order of samples would "
            f"differ. {OTHERWISE}"
        )
    more_samples = _more_samples(found, state, parts, config)
    step = _next_step(found, state, parts, config)
    try:
        _restore_memory(state, parts, config)
        checkpoint.restore(state, parts.modules, parts.step.optimizer)
    except ConfigError as error:
        raise ConfigError(f"{found}: {error}") from error
    parts.step.load_state_dict(state.facts["step_state"])
    counted_anew = state.facts["global_batch_size"] != config.global_batch_size
    state = replace(state, step=step, memory={})  # of which each rank has its part, and the whole may be large
    return Start(state, counted_anew, more_samples)


def _next_step(found: Path, state: CheckpointState, parts: Parts, config: TrainConfig) -> int:
    """See the top of this file."""
    before, now, seen = state.facts["global_batch_size"], config.global_batch_size, state.facts["samples_seen"]
    if before == now:
        return state.step
    if not config.resume.allow_batch_change:
        raise ConfigError(
            f"{found} was trained with global_batch_size={before}, now {now}.\n"
            "resume.allow_batch_change=true goes on at the same number of samples; or use the old batch"
        )
    step = seen // now
    if step >= parts.total_steps:
        raise ConfigError(
            f"{found} has seen {seen:,} samples: {step:,} steps of global_batch_size={now}, and the run ends after "
            f"{parts.total_steps:,} of them. Set steps or epochs to go further"
        )
    every = config.data.negatives.refresh_every
    if every and step % every:
        raise ConfigError(
            f"{found} has seen {seen:,} samples: {step:,} steps of global_batch_size={now}, inside a segment of "
            f"data.negatives.refresh_every={every}. Set it to a divisor of {step}: negatives are mined at its borders"
        )
    return step


def _more_samples(found: Path, state: CheckpointState, parts: Parts, config: TrainConfig) -> int:
    """How many samples were added since; refuses other data, naming what is different."""
    if state.facts["data_fingerprint"] == parts.data.fingerprint:
        return 0
    changes = manifest.changes(state.facts["data"], parts.data.manifest)
    if changes.different or not changes.added:
        shown = "".join(f"\n  {key}: {said}" for key, said in changes.different.items())
        raise ConfigError(
            f"{found} was trained with other data (fingerprint {state.facts['data_fingerprint'][:16]}, now "
            f"{parts.data.fingerprint[:16]}):{shown}\n{OTHERWISE}"
        )
    if not config.resume.allow_more_data:
        shown = ", ".join(f"{count:,} samples to {key}" for key, count in changes.added.items())
        raise ConfigError(
            f"{found} was trained with less data: added behind it, {shown}.\n"
            "resume.allow_more_data=true goes on with all of them; or use the old data"
        )
    return changes.added.get("data.train", 0)


def _restore_memory(state: CheckpointState, parts: Parts, config: TrainConfig) -> None:
    if parts.memory is None and not state.memory:
        return
    if parts.memory is None or not state.memory:
        raise ConfigError(f"it has {'' if state.memory else 'no '}per-sample state: it is of another objective")
    parts.memory.load(state.memory, more_samples=config.resume.allow_more_data)
