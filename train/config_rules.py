"""The rules of a training run's configuration: which values and combinations cannot work. Does not import torch."""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dyad.data.base.errors import raise_broken
from dyad.data.base.limits import broken_limits
from dyad.data.config import Batches, DrawnPositives, ItemKind, Mode, Shuffle, Title
from dyad.data.shards.storage import scheme_of
from dyad.train.checkpoint_config import best_rules, keep_rules
from dyad.train.config import (
    ITEMS,
    KNOWN_BY_WEIGHTS,
    LISTED,
    UNTRACED,
    Head,
    Parallel,
    Precision,
    Schedule,
    TargetKind,
    Task,
    TrainConfig,
)
from dyad.train.losses.options.choices import CandidateSet, Directions, Duplicates, Setting, Similarity
from dyad.train.losses.options.common import ExpectedBatch, ObjectiveOptions
from dyad.train.losses.options.registry import OBJECTIVES
from dyad.train.negatives_rules import negatives_rules

# What an objective may take in place of pairs
OWN_INPUTS = {Task.sequence: "sequences", Task.language_model: "log-likelihoods"}


def validate(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError for required values that are missing, and for all that `check_values` refuses.

    Required are data.train, and steps or epochs. world_size: the number of training processes on all machines together.
    """
    raise_broken(chain(_missing(config), _broken(config, world_size)))


def check_values(config: TrainConfig, world_size: int = 1) -> None:
    """Raise ConfigError for values and combinations that cannot work.

    The message has a line for each of the first five, with the keys and the fix. data.train, steps and epochs may be
    missing. No file is read. world_size: as for `validate`.
    """
    raise_broken(_broken(config, world_size))


def _missing(config: TrainConfig) -> Iterator[str]:
    """Yield an error message for each required value that is missing."""
    if config.data.train is None:
        yield "data.train is missing: give shards, e.g. data.train=shards/train.tar, or experiment=emoji"
    if config.steps is None and config.epochs is None:
        yield "steps or epochs is missing: say how long to train, e.g. steps=1000"


def _broken(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Yield a message for each rule that the configuration breaks, in the order in which they are reported."""
    yield from _general_rules(config, world_size)
    yield from _length_rules(config)
    yield from keep_rules(config.checkpoint)
    yield from best_rules(config.checkpoint, config.eval.every, config.evaluates)
    yield from negatives_rules(config.data, config.task, getattr(config.objective, "name", ""))
    yield from _stream_rules(config)
    yield from _sharding_rules(config)
    yield from _objective_rules(config)
    if config.task is Task.language_model:
        yield from _language_model_rules(config)


def _general_rules(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Yield an error message for each broken rule of run.*, model.*, data.augment, profile and global_batch_size.

    Yields one for each broken limit of a number too.
    """
    steps, size, model, profile = config.steps, config.global_batch_size, config.model, config.profile
    folder = Path(os.path.expanduser(config.run.name or "run"))
    if folder.is_absolute() or ".." in folder.parts or not folder.parts:
        yield f"run.name={config.run.name}: names a folder in run.dir. Set run.dir=PARENT run.name=NAME"
    if scheme_of(config.run.dir):
        yield f"run.dir={config.run.dir}: runs are written to a file system. Set run.dir=FOLDER, and copy it afterwards"
    for name in ("classes", "prompts", "inputs"):
        if (value := getattr(config.run, name)) is not None:
            yield f"run.{name}={value}: the run finds it in its data, and writes it. Leave it out"
    for name, there, tower in (("image", config.has_images, model.image), ("text", config.has_texts, model.text)):
        if there and tower.frozen and tower.lora_rank:
            start = f"model.{name}.frozen=true, model.{name}.lora_rank={tower.lora_rank}"
            yield f"{start}: adapters train on weights that are frozen anyway. Take either"
    if model.head is not Head.none and model.embed_dim is None:
        yield f"model.head={model.head}: where to? Set model.embed_dim"
    unchanged = all(augment == type(augment)() for augment in config.data.augments)
    if config.task is Task.views and config.has_images and not model.image.patch_dropout and unchanged:
        yield (
            "data.augment changes nothing, and both views of an image would be equal. Take data=simclr or data=byol, "
            "or set data.augment.…"
        )
    if profile > 0 and steps is not None and steps <= UNTRACED:
        untraced = f"profile={profile}: the first {UNTRACED} steps are not traced"
        yield f"{untraced}. Set steps={UNTRACED + profile} or more, not {steps}"
    if size < world_size:
        yield f"global_batch_size={size}: needs at least one pair for each of {world_size} processes"
    yield from broken_limits(config)


def _length_rules(config: TrainConfig) -> Iterator[str]:
    """Yield an error message for an impossible optim.warmup or optim.cooldown, and unknown names in from_weights."""
    steps, optim = config.steps, config.optim
    if optim.warmup >= 1 and isinstance(optim.warmup, float):
        yield f"optim.warmup={optim.warmup}: steps are a whole number, and a share of the run is below 1"
    if steps is not None and optim.cooldown > steps >= 1:
        yield f"optim.cooldown={optim.cooldown}: longer than the run of steps={steps}"
    if optim.schedule is Schedule["wsd"] and not optim.cooldown:
        yield "optim.schedule=wsd: the learning rate would stay. Set optim.cooldown, e.g. a fifth of the steps"
    if not {*config.from_weights} <= {*KNOWN_BY_WEIGHTS}:
        yield f"from_weights={config.from_weights}: a list of {', '.join(KNOWN_BY_WEIGHTS)}"


def _stream_rules(config: TrainConfig) -> Iterator[str]:
    """Yield an error message for keys that data.mode=stream excludes or needs, and for data.id_key without it."""
    data, objective = config.data, config.objective
    if data.mode is not Mode.stream:
        if data.id_key is not None:
            yield f"data.id_key={data.id_key}: indexed samples are numbered by their places"
        return
    if config.task is not Task.image_text:
        yield f"data.mode=stream: task={config.task.value} needs an index; only image_text is streamed"
    if config.steps is None and config.epochs is not None:
        yield f"epochs={config.epochs}: nobody has counted the samples of data.mode=stream. Say steps=…"
    if data.id_key is None and getattr(objective, "by_sample_id", False):
        yield (
            f"objective={getattr(objective, 'name', '')}: knows every sample by its number, and data.mode=stream does "
            "not have one. Set data.id_key to the json field that holds it, 0 … N - 1"
        )
    if data.batches is Batches.by_source:
        yield "data.batches=by_source: data.mode=stream mixes all sources; leave it out"
    if data.shuffle is Shuffle.full:
        yield "data.shuffle=full: data.mode=stream mixes by shards and in data.buffer; leave it out"
    if config.resume.allow_more_data:
        yield (
            "resume.allow_more_data: the passes of data.mode=stream would be others. Start another run.name with "
            "init_from"
        )


def _sharding_rules(config: TrainConfig) -> Iterator[str]:
    """Yield an error message for each key that cannot go with sharded towers (dist.name=fsdp2, hsdp).

    With dist.name=ddp, dist.shard_size is refused.
    """
    dist, optimizer = config.dist, config.optim.name
    start, way_out = f"dist.name={dist.name}", "Take dist.name=ddp, or"
    if dist.name is Parallel.ddp:
        if dist.shard_size is not None:
            yield f"dist.shard_size={dist.shard_size}: dist.name=ddp shards nothing. Add dist.name=fsdp2 or hsdp"
        return
    if config.also:
        yield f"{start}: the towers of several losses cannot be sharded. {way_out} leave also.* out"
    if config.precision is Precision.fp16:
        yield f"{start}, precision=fp16: {way_out} precision=bf16"
    if optimizer != "adamw":
        yield f"{start}, optim.name={optimizer}: {way_out} optim.name=adamw"


def _objective_rules(config: TrainConfig) -> Iterator[str]:
    """Yield error messages about an objective that does not fit the task, the data or the model.

    Some keys of data.* that do not fit the task, such as data.items and data.batches, are refused too. Most of these
    mistakes would else show only after the run folder is made, or never.
    """
    objective, data, target = config.objective, config.data, config.target.kind
    takes, is_sequence = getattr(objective, "takes", ()), config.task is Task.sequence
    listed = config.task in LISTED and data.passage.positives is DrawnPositives.all
    classes, rare = config.task is Task.labelled and data.rare is None, data.rare is not None
    if target is not TargetKind.none and "targets" not in takes:
        takers = " or ".join(name for name, of in OBJECTIVES.items() if "targets" in of.takes)
        name = getattr(objective, "name", "")
        yield f"target.kind={target}: objective={name} takes no targets. Leave it out, or take objective={takers}"
    by_key = getattr(objective, "duplicates", None) is Duplicates.positive
    own_lists = getattr(objective, "candidates", None) is CandidateSet.list
    is_supervised = getattr(objective, "setting", None) is Setting.supervised
    if is_supervised and not (listed or by_key or classes or own_lists):
        yield (
            "objective.setting=supervised: nothing says which further columns are positive, so it would be "
            "setting=self. Set objective.duplicates=positive, data.passage.positives=all, or objective.candidates=list"
        )
    if rare and data.rare_per_batch >= (size := config.global_batch_size):
        yield (
            f"data.rare_per_batch={data.rare_per_batch}: a batch has others too. Set it below global_batch_size={size}"
        )
    if config.model.context.embed_dim is not None and is_sequence and "lengths" not in takes:
        yield (
            "model.context.embed_dim: a context is scored with items, and has their width. Leave it out, or take "
            "objective=cpc"
        )
    if not is_sequence and data.items in (ItemKind.ids, ItemKind.frames):
        yield f"data.items={data.items}: only task=sequence has them. Take images or texts"
    if is_sequence and data.batches is Batches.by_source:
        yield "data.batches=by_source: a log has no sources; leave it out"
    if rare and data.batches is Batches.by_source:
        yield "data.batches=by_source: data.rare draws from the classes of all sources; leave it out"
    if isinstance(objective, ObjectiveOptions):
        yield from objective.broken_by(_expected_batch(config, objective, listed, classes))


def _language_model_rules(config: TrainConfig) -> Iterator[str]:
    """Yield an error message if the objective or data.passage.title does not fit task=language_model."""
    objective = config.objective
    if config.data.passage.title is Title.pair:
        yield "data.passage.title=pair: task=language_model has answers of one text. Set it to join or drop"
    of_lists = getattr(objective, "candidates", None) is CandidateSet.list
    rows_only = getattr(objective, "directions", None) is Directions.x
    of_rows = (of_lists and rows_only) or objective.inputs == OWN_INPUTS[config.task]
    if not (of_rows and objective.similarity is Similarity.dot):
        yield (
            f"task=language_model, objective={getattr(objective, 'name', '')}: a score is of a prompt and an answer of "
            "its own list, and no cosine. Take objective=one_sided_dpm objective.candidates=list "
            "objective.similarity=dot, or objective=nll"
        )


def _expected_batch(config: TrainConfig, objective: ObjectiveOptions, listed: bool, classes: bool) -> ExpectedBatch:
    """Return the properties of the run's global batches by which an objective is refused or taken (see ExpectedBatch).

    listed: whether a batch has all positive passages of each question. classes: whether the y items are the classes,
    one each, in place of the other half of each pair.
    """
    data, is_sequence = config.data, config.task is Task.sequence
    inputs = "scores" if config.task is Task.labelled and data.rare is not None else "pairs"
    further, further_x = listed or data.negatives.per_row > 0 or classes, data.negatives.pictures > 0
    if config.task is Task.question_passage and data.teacher is not None:
        inputs = "scored lists" if further else "scored pairs"
    if objective.inputs == OWN_INPUTS.get(config.task):
        inputs = objective.inputs
    has_catalogue = (config.task in ITEMS and data.mode is Mode.indexed) or (
        is_sequence and data.items is not ItemKind.frames
    )
    graded = data.relevance is not None and config.task in (Task.image_text, Task.question_passage)
    steps = data.sequence.length if is_sequence and inputs == "pairs" else 1  # each step of a sequence is a pair
    pairs = config.global_batch_size * steps
    return ExpectedBatch(pairs, further, listed, classes, inputs, has_catalogue, graded, further_x)
