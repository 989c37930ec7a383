"""The classes of task=labelled: find their names and prompts before the model is built, and make their tower inputs."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dyad.data.base.errors import ConfigError, SampleError, nearest
from dyad.data.image_text.items import Captions
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.class_batches import ClassNumbers, class_key, distinct
from dyad.data.question_passage.fields import label_of
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.text_views import open_texts, text_tokens
from dyad.data.sequence.open import input_size
from dyad.data.shards.rows import Rows
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import prepared_tables, table_options
from dyad.eval.encode.encoder import Encoder
from dyad.eval.tasks.prompts import read_task
from dyad.train.config import Classes, Task, TrainConfig
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.world import World
from dyad.train.towers.models import TwoTowerModel


@dataclass(frozen=True)
class LabelledSamples:
    """Samples with a class.

    shards: the shards that hold them. rows: the rows of texts; None for images. field: the field that holds the class
    (data.label).
    """

    shards: Shards
    rows: Rows | None
    field: str

    def label(self, i: int) -> str | None:
        """Return the class of sample i; None if it has none that can be read.

        The loader replaces such a sample by another one.
        """
        with suppress(SampleError):
            if self.rows:
                return self.rows.read(i, partial(label_of, name=self.field), SampleError)
            return ShardSample.read(self.shards, i).label(self.field)


def open_labelled(value: Any, config: TrainConfig) -> LabelledSamples:
    """Open samples with a class: images or texts, as config.task and data.items say.

    value: shards, tables or files of texts, in the syntax of data.train. Tables are converted to shards in the cache,
    and missing indexes are written. Raises ConfigError for a value that cannot work, DataError for damaged files.
    """
    if not config.has_images:
        rows = open_texts(value, config.data)
        return LabelledSamples(rows.shards, rows, config.data.label)
    shards = open_shards(parse_sources(value, tables=prepared_tables(table_options(config.data))))
    return LabelledSamples(shards, None, config.data.label)


def resolve_classes(config: TrainConfig, world: World) -> TrainConfig:
    """Return `config` with the keys under `run` filled in that the model is built from.

    For task=labelled these are run.classes, the names of the classes, and run.prompts, a prompt for each. The classes
    are those of data.classes: a list, or a task file, of which the first prompt of each class is taken. Without
    data.classes they are all labels of the training data, sorted. With data.rare they are that class alone. Unless a
    task file has prompts, a prompt is the name put into data.template; the name alone without one, or with
    data.label=txt. For task=sequence the key is run.inputs, the number of item ids, or of features of a frame. For
    other tasks `config` is returned unchanged.

    Every rank must call it. Rank 0 reads the data, and raises ConfigError or DataError on all ranks: if the task file
    does not exist or is damaged, if there are fewer than two classes (data.rare and another one), or for data that
    cannot be read.
    """
    if config.task is Task.sequence:
        return replace(config, run=replace(config.run, inputs=from_rank_0(world, lambda: input_size(config.data))))
    if config.task is not Task.labelled:
        return config
    found = from_rank_0(world, lambda: _prompts_of_classes(config))
    return replace(config, run=replace(config.run, classes=[*found], prompts=[*found.values()]))


def _prompts_of_classes(config: TrainConfig) -> dict[str, str]:
    """Return class name → prompt, for task=labelled. Raises the errors of `resolve_classes`, on this rank."""
    data, rare = config.data, config.data.rare
    if rare is None and isinstance(data.classes, str):
        if not (path := Path(data.classes).expanduser()).is_file():
            raise ConfigError(f"data.classes={path}: no such file. Give a task file (JSON), or the classes: [a,b]")
        return {name: prompts[0] for name, prompts in read_task(path).classes.items()}
    names: list[str] = [*map(str, data.classes or [])]
    if not names or rare is not None:
        samples = open_labelled(data.train, config)
        labels = distinct(label for i in range(len(samples.shards)) if (label := samples.label(i)) is not None)
        # names that are whole numbers are sorted by value
        names = sorted(labels, key=lambda name: (len(name) * name.isdecimal(), name))
    if len(names) < 2 or (rare is not None and class_key(rare) not in map(class_key, names)):
        wanted = "two classes" if rare is None else f"data.rare={rare} and of others"
        hint = nearest(rare or "", names) or f" It has {', '.join(names[:10]) or 'none'}"
        raise ConfigError(f"data.label={data.label}: data.train must have samples of {wanted}.{hint}")
    template = "{}" if data.template is None or data.label == "txt" else data.template
    return {name: template.replace("{}", name) for name in ([rare] if rare is not None else names)}


def class_inputs(config: TrainConfig, model: TwoTowerModel) -> tuple[list[str], Any]:
    """Return (a text for each class, the function that converts such texts to inputs of the y tower).

    The texts are run.prompts, which become token ids, int64 (C, L). If the vectors of classes are learnt
    (model.classes=learnt), they are run.classes, the names, which become the numbers of the classes, int64 (C,).
    """
    if config.model.classes is Classes.learnt:
        return config.run.classes or [], ClassNumbers(config.run.classes or [])
    tokenize = partial(text_tokens, Passage, model.tokenize, config.data.passage)
    return config.run.prompts or [], model.tokenize if config.has_images else tokenize


def class_vectors(config: TrainConfig, model: TwoTowerModel, encoder: Encoder) -> dict[str, np.ndarray]:
    """Return class name → the vector with which samples are compared, float32 (D,), in the order of run.classes.

    It is empty for a model without such vectors: of another task, or of a rare class. model: as it was trained, with
    its y tower. encoder: how it runs; its towers may be those of `representation`.
    """
    if config.task is not Task.labelled or config.data.rare is not None:
        return {}
    texts, tokenize = class_inputs(config, model)
    encode = replace(encoder, towers={"y": model.towers.y_tower.to(encoder.world.device)})
    return dict(zip(config.run.classes or [], encode("y", Captions(texts, tokenize)), strict=True))
