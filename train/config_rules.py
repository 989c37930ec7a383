"""The rules of a training run's configuration: which values and combinations cannot work. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path

from dyad.data.base.errors import ConfigError
from dyad.data.base.limits import broken_limits
from dyad.data.config import Batches, DrawnPositives, ItemKind, Mode, Shuffle
from dyad.train.checkpoint_config import best_rules
from dyad.train.config import (
    ITEMS,
    KNOWN_BY_WEIGHTS,
    UNTRACED,
    Head,
    Parallel,
    Precision,
    TargetKind,
    Task,
    TrainConfig,
)
from dyad.train.losses.options.choices import CandidateSet, Duplicates, Setting
from dyad.train.losses.options.common import ExpectedBatch, ObjectiveOptions
from dyad.train.losses.options.registry import OBJECTIVES
from dyad.train.negatives_rules import negatives_rules


def validate(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError for values that are missing, and as `check_values` does; the message names the fix.

    world_size: the number of training processes on all machines together.
    """
    length = config.epochs if config.steps is None else config.steps
    missing = {
        "data.train is missing: give shards, e.g. data.train=shards/train.tar, or experiment=emoji": config.data.train,
        "steps or epochs is missing: say how long to train, e.g. steps=1000": length,
    }
    check_values(config, world_size, [message for message, value in missing.items() if value is None])


def check_values(config: TrainConfig, world_size: int = 1, broken: Sequence[str] = ()) -> None:
    """Raise ConfigError for values and combinations that cannot work; the message names the keys and the fix.

    world_size: as for `validate`. broken: messages about further mistakes.
    """
    steps, size, optim = config.steps, config.global_batch_size, config.optim
    rules = {
        f"run.name={config.run.name}: names a folder in run.dir. Set run.dir=PARENT run.name=NAME": Path(
            config.run.name or ""
        ).is_absolute(),
        f"model.head={config.model.head}: where to? Set model.embed_dim": config.model.head is not Head.none
        and config.model.embed_dim is None,
        "data.augment changes nothing, and both views of a picture would be equal. Take data=simclr or data=byol, or "
        "set data.augment.…": config.task is Task.views
        and config.has_pictures
        and not config.model.image.patch_dropout
        and all(augment == type(augment)() for augment in config.data.augments),
        f"profile={config.profile}: the first {UNTRACED} steps are not traced. Set steps={UNTRACED + config.profile} or"
        f" more, not {steps}": config.profile > 0 and steps is not None and steps <= UNTRACED,
        f"global_batch_size={size}: needs at least one pair for each of {world_size} processes": size < world_size,
        **dict.fromkeys(broken_limits(config), True),
        f"optim.warmup={optim.warmup}: steps are a whole number, and a share of the run is below 1": optim.warmup >= 1
        and isinstance(optim.warmup, float),
        f"optim.cooldown={optim.cooldown}: longer than the run of steps={steps}": steps is not None
        and optim.cooldown > steps >= 1,
        f"from_weights={config.from_weights}: a list of {', '.join(KNOWN_BY_WEIGHTS)}": not {*config.from_weights}
        <= {*KNOWN_BY_WEIGHTS},
        **best_rules(config.checkpoint, config.eval.every, bool(config.data.val or config.eval.suite or config.also)),
        **negatives_rules(config.data, config.task, getattr(config.objective, "name", "")),
        **_stream_rules(config),
        **_sharding_rules(config),
        **_objective_rules(config),
    }
    if broken := [*broken, *(message for message, is_broken in rules.items() if is_broken)]:
        raise ConfigError("\n".join(broken[:5]))


def _sharding_rules(config: TrainConfig) -> dict[str, bool]:
    dist, is_sharded = config.dist, config.dist.name is not Parallel.ddp
    start, way_out = f"dist.name={dist.name}", "Take dist.name=ddp, or"
    return {
        f"{start}: the towers of several losses cannot be sharded. {way_out} leave also.* out": is_sharded
        and bool(config.also),
        f"{start}, precision=fp16: {way_out} precision=bf16": is_sharded and config.precision is Precision.fp16,
        f"{start}, optim.name={config.optim.name}: {way_out} optim.name=adamw": is_sharded
        and config.optim.name != "adamw",
        f"dist.shard_size={dist.shard_size}: dist.name=ddp shards nothing. Add dist.name=fsdp2 or hsdp": not is_sharded
        and dist.shard_size is not None,
    }


def _objective_rules(config: TrainConfig) -> dict[str, bool]:
    """Return the rules of the objective as error message → whether the rule is broken.

    Without these checks a broken rule would only fail at the first step, after the run folder is made.
    """
    objective = config.objective
    listed = config.task is Task.question_passage and config.data.passage.positives is DrawnPositives.all
    classes, rare = config.task is Task.labelled and config.data.rare is None, config.data.rare is not None
    further, further_x = listed or config.data.negatives.per_row > 0 or classes, config.data.negatives.pictures > 0
    inputs = "scores" if config.task is Task.labelled and rare else "pairs"
    if config.task is Task.sequence and isinstance(objective, ObjectiveOptions) and "lengths" in objective.takes:
        inputs = objective.inputs
    frames = config.data.items is ItemKind.frames
    has_catalogue = (config.task in ITEMS and config.data.mode is Mode.indexed) or (
        config.task is Task.sequence and not frames
    )
    graded = config.data.relevance is not None and config.task in (Task.image_text, Task.question_passage)
    of_data = further, listed, classes, inputs, has_catalogue, graded, further_x
    expected = ExpectedBatch(config.global_batch_size, *of_data)
    by_key = getattr(objective, "duplicates", None) is Duplicates.positive
    supervised = getattr(objective, "setting", None) is Setting.supervised
    own_lists = getattr(objective, "candidates", None) is CandidateSet.list
    target, takers = config.target.kind, [name for name, of in OBJECTIVES.items() if "targets" in of.takes]
    return {
        f"target.kind={target}: objective={getattr(objective, 'name', '')} takes no targets. Leave it out, or take "
        f"objective={' or '.join(takers)}": target is not TargetKind.none
        and "targets" not in getattr(objective, "takes", ()),
        "objective.setting=supervised: nothing says which further columns are positive, so it would be setting=self. "
        "Set objective.duplicates=positive, data.passage.positives=all, or objective.candidates=list": supervised
        and not (listed or by_key or classes or own_lists),
        f"data.rare_per_batch={config.data.rare_per_batch}: a batch has others too. Set it below global_batch_size="
        f"{config.global_batch_size}": rare and config.data.rare_per_batch >= config.global_batch_size,
        "model.context.embed_dim: a context is scored with items, and has their width. Leave it out, or take "
        "objective=cpc": config.model.context.embed_dim is not None
        and config.task is Task.sequence
        and "lengths" not in getattr(objective, "takes", ()),
        "data.batches=by_source: a log has no sources; leave it out": config.task is Task.sequence
        and config.data.batches is Batches.by_source,
        "data.batches=by_source: data.rare draws from the classes of all sources; leave it out": rare
        and config.data.batches is Batches.by_source,
        **dict.fromkeys(objective.broken_by(expected) if isinstance(objective, ObjectiveOptions) else (), True),
    }


def _stream_rules(config: TrainConfig) -> dict[str, bool]:
    """Return the rules of data.mode as error message → whether it is broken."""
    data, objective = config.data, config.objective
    if data.mode is not Mode.stream:
        return {f"data.id_key={data.id_key}: indexed samples are numbered by their places": data.id_key is not None}
    return {
        f"data.mode=stream: task={config.task.value} needs an index; only image_text is streamed": config.task
        is not Task.image_text,
        f"epochs={config.epochs}: nobody has counted the samples of data.mode=stream. Say steps=…": config.steps is None
        and config.epochs is not None,
        f"objective={getattr(objective, 'name', '')}: knows every sample by its number, and data.mode=stream does not "
        "have one. Set data.id_key to the json field that holds it, 0 … N - 1": data.id_key is None
        and getattr(objective, "by_sample_id", False),
        "data.batches=by_source: data.mode=stream mixes all sources; leave it out": data.batches is Batches.by_source,
        "data.shuffle=full: data.mode=stream mixes by shards and in data.buffer; leave it out": data.shuffle
        is Shuffle.full,
        "resume.allow_more_data: the passes of data.mode=stream would be others. Start another run.name with "
        "init_from": config.resume.allow_more_data,
    }
