"""The classes of task=labelled: their names and prompts, found before the model is built, and their inputs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dyad.data.base.errors import ConfigError, SampleError, nearest
from dyad.data.config import PassageConfig
from dyad.data.image_text.sample import ShardSample
from dyad.data.loading.classes import ClassNumbers
from dyad.data.question_passage.dataset import TokenizeTexts, tokens
from dyad.data.question_passage.labelled import text_label
from dyad.data.question_passage.passages import Passage
from dyad.data.question_passage.views import open_texts, text_of
from dyad.data.shards.rows import Rows
from dyad.data.shards.shards import Shards, open_shards
from dyad.data.shards.sources import parse_sources
from dyad.data.tables.prepare import prepared_tables, table_options
from dyad.eval.tasks.prompts import read_task
from dyad.train.config import Classes, Task, TrainConfig
from dyad.train.distributed.agreement import from_rank_0
from dyad.train.distributed.world import World
from dyad.train.towers.build import TwoTowerModel


@dataclass(frozen=True)
class LabelledSamples:
    """Samples with a class: the shards that hold them, of texts their rows, and what holds the class (data.label)."""

    shards: Shards
    rows: Rows | None
    field: str

    def labels(self) -> Iterator[str | None]:
        """Yield the class of each sample, None for a sample without one."""
        for i in range(len(self.shards)):
            try:
                yield self._label(i)
            except SampleError:
                yield None

    def known_labels(self) -> list[str]:
        """Return the class of each sample. Raises SampleError for a sample without one."""
        return [self._label(i) for i in range(len(self.shards))]

    def texts(self) -> list[str]:
        """Return the texts of all rows, with their titles."""
        rows = self.rows
        found = [rows.read(i, text_of) for i in range(len(rows))] if rows else []
        return [f"{text.title} {text.text}".strip() for text in found]

    def _label(self, i: int) -> str:
        return text_label(self.rows, i, self.field) if self.rows else ShardSample.read(self.shards, i).label(self.field)


def open_labelled(value: Any, config: TrainConfig) -> LabelledSamples:
    """Open samples with a class. value: shards, tables or texts, as data.train. Errors as of `open_shards`."""
    if config.has_pictures:
        shards, rows = open_shards(parse_sources(value, tables=prepared_tables(table_options(config.data)))), None
    else:
        rows = open_texts(value, config.data)
        shards = rows.shards
    return LabelledSamples(shards, rows, config.data.label)


def with_classes(config: TrainConfig, world: World) -> TrainConfig:
    """Return `config` with the classes of task=labelled in run.classes, and a prompt of each in run.prompts.

    They are data.rare alone; or those of data.classes, of a task file the first prompt of each; or all labels of the
    training data, sorted. Every rank must call it. Raises ConfigError if there are fewer than two, or no sample is of
    data.rare.
    """
    if config.task is not Task.labelled:
        return config
    found = from_rank_0(world, lambda: _found(config))
    return replace(config, run=replace(config.run, classes=[*found], prompts=[*found.values()]))


def _found(config: TrainConfig) -> dict[str, str]:
    """Return the name of each class → its prompt."""
    data = config.data
    if data.rare is None and isinstance(data.classes, str):
        return {name: prompts[0] for name, prompts in read_task(Path(data.classes).expanduser()).classes.items()}
    if (names := data.classes) is None or data.rare is not None:
        names = {label for label in open_labelled(data.train, config).labels() if label is not None}
        names = sorted(names, key=lambda name: (int(name), name) if name.isdecimal() else (float("inf"), name))
    if data.rare is not None and data.rare not in names:
        hint = nearest(data.rare, names) or f" There are {', '.join(names[:10])}{', …' * (len(names) > 10)}"
        raise ConfigError(
            f"data.rare={data.rare}: no sample of data.train has this class (data.label={data.label}).{hint}"
        )
    if len(names) < 2:
        raise ConfigError(f"data.label={data.label}: {len(names)} classes in data.train, and at least two are needed")
    template = "{}" if data.template is None or data.label == "txt" else data.template
    return {name: template.replace("{}", name) for name in ([data.rare] if data.rare is not None else map(str, names))}


def class_tokenizer(config: TrainConfig, model: TwoTowerModel) -> Any:
    """Return what converts texts of classes, run.prompts, to inputs of the y tower; of learnt classes their names."""
    if config.model.classes is Classes.learnt:
        return ClassNumbers(config.run.classes or [])
    return model.tokenize if config.has_pictures else partial(prompt_tokens, model.tokenize, config.data.passage)


def class_texts(config: TrainConfig) -> dict[str, list[str]]:
    """Return the name of each class → the texts that `class_tokenizer` takes for it: one."""
    names = config.run.classes or []
    texts = names if config.model.classes is Classes.learnt else config.run.prompts or []
    return {name: [text] for name, text in zip(names, texts, strict=True)}


def prompt_tokens(tokenize: TokenizeTexts, config: PassageConfig, texts: list[str]) -> Tensor:
    """Tokenise n texts as passages, int64 (n, L), L tokens of the longest."""
    return tokens(map(Passage, texts), tokenize, config)
