"""Kinds of data sets of samples with a class: classes, of task=labelled, and probe, for models of images or texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dyad.data.base.errors import ConfigError
from dyad.data.config import ItemKind
from dyad.data.question_passage.passages import Passage, Question
from dyad.data.shards.sources import ShardSource, Tables, parse_sources, written_sources
from dyad.data.tables.folders import tables_of
from dyad.data.tables.image_table import image_table
from dyad.data.tables.prepare import checked_tables, prepared_tables, table_options
from dyad.eval.tasks.prompts import read_probe
from dyad.evaluation.suite_entry import Inputs, SuiteEntry, SuiteKind
from dyad.train.config import Task

if TYPE_CHECKING:
    from dyad.eval.encode.encoder import Evaluator
    from dyad.train.towers.models import ImageTextModel


def _labelled(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry classes:SHARDS, of images or of texts, whose classes are those of training.

    With data.rare it is the evaluator of this one class. The model of `inputs` must have been built with run.classes.
    """
    from dyad.data.image_text.items import labelled_set
    from dyad.data.question_passage.text_views import labelled_texts, text_tokens, titled_text
    from dyad.eval.tasks.labelled import RareClass, TrainedClasses
    from dyad.run.class_names import class_inputs, open_labelled

    config, model, rare = inputs.config, cast("ImageTextModel", inputs.model), inputs.config.data.rare
    found = open_labelled(entry.target, config)
    if found.rows:
        tokenize = partial(text_tokens, Passage, model.tokenize, config.data.passage)
        data = labelled_texts(found.shards, config.data.label, tokenize, titled_text)
    else:
        data = labelled_set(found.shards, model.image, config.data, config.data.label)
    if rare is not None:
        return RareClass(entry.name, entry.spec, data, rare, getattr(config.objective, "alpha", 1.0))
    texts, tokenize = class_inputs(config, model)
    prompts = {name: [text] for name, text in zip(config.run.classes or [], texts, strict=True)}
    return TrainedClasses(entry.name, entry.spec, data, prompts, tokenize, index=config.eval.index)


def _check_labelled(entry: SuiteEntry) -> None:
    """Raise ConfigError if the shards, tables or files of texts of an entry classes:SHARDS are missing or invalid.

    Raises DataError for a table that cannot be read.
    """
    if entry.data.items is ItemKind.pictures:
        parse_sources(entry.target, entry.key, tables=checked_tables(table_options(entry.data)))
    else:
        from dyad.data.question_passage.text_views import text_sources

        text_sources(entry.target, entry.data, checked_tables, entry.key)


def _parts(tables: Callable[[Any], Tables], entry: SuiteEntry) -> tuple[list[list[ShardSource]], str]:
    """Return the sources of the training and of the test part of a probe, and the field that holds the class.

    tables: `checked_tables`, which only checks tables, or `prepared_tables`, which converts them to shards. Raises
    ConfigError if the task file or a part is missing or invalid, DataError for a table that cannot be read.
    """
    named, label = read_probe(entry.path)
    found = tables(table_options(entry.data))
    return [parse_sources(shards, f"{entry.target}: {part}", tables=found) for part, shards in named.items()], label


def _are_texts(sources: Sequence[ShardSource]) -> bool:
    """Whether the samples of `sources` are texts, where the model takes images: all files are .jsonl files."""
    return all(shard.endswith(".jsonl") for source in sources for shard in source.shards)


def _check_probe(entry: SuiteEntry) -> None:
    """Raise the errors of `_parts`, and ConfigError for texts where the model takes none."""
    parts, _ = _parts(checked_tables, entry)
    options, named = table_options(entry.data), written_sources(read_probe(entry.path)[0]["train"], entry.target)
    tables = (table for source in named for table in tables_of(source.path, options.columns))
    if not entry.has_texts and _are_texts(parts[0]) and not any(image_table(table, options) for table in tables):
        raise ConfigError(f"{entry.target}: train names texts (.jsonl), which this model does not take. Name images")


def _probe(entry: SuiteEntry, inputs: Inputs) -> Evaluator:
    """Build the evaluator of an entry probe:TASK.json, which fits a linear probe to frozen features of the model.

    The samples are texts if the model takes no images, or if every file of the training part is a .jsonl file; the test
    part must be of the same kind. Texts go through the y tower of a model of images and texts, all else through the x
    tower. The classes are the labels of the training part, sorted.
    """
    from dyad.data.image_text.items import labelled_set
    from dyad.data.loading.class_batches import distinct
    from dyad.data.question_passage.text_views import labelled_texts, text_tokens
    from dyad.data.shards.shards import open_shards
    from dyad.eval.tasks.probe import Probe

    parts, label = _parts(prepared_tables, entry)
    model, data, options = inputs.model, inputs.config.data, inputs.config.eval
    image = cast("Any", getattr(model, "image", None))  # None for a model that takes no images
    has_texts = not image or _are_texts(parts[0])
    if has_texts:
        # models of questions and passages embed a text as a question, models of other tasks as a passage
        questions = inputs.config.task is Task.question_passage
        kind, lengths = (partial(Question, ""), data.question) if questions else (Passage, data.passage)
        tokenize = model.tokenize if image else partial(text_tokens, kind, model.tokenize, lengths)
        train, test = (labelled_texts(open_shards(sources), label, tokenize) for sources in parts)
    else:
        train, test = (labelled_set(open_shards(sources), image, data, label) for sources in parts)
    side, names = "y" if has_texts and image else "x", distinct(train.labels)
    return Probe(entry.name, entry.spec, test, names, train, side, options.probe_features, options.probe_k)


CLASSES = SuiteKind(Task.labelled, "SHARDS", _check_labelled, _labelled)
PROBE = SuiteKind(None, "TASK.json", _check_probe, _probe)
