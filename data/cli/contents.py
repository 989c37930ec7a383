"""Read the contents of the rows of a source by content key: images and captions, or questions and right passages."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median_low
from typing import Any

from dyad.data.base.errors import BadRow, ConfigError, DataError, SampleError
from dyad.data.cli import outputs
from dyad.data.cli.inputs import InputKind, first_rows, is_beir, kind_of, open_input, require_images, shards_of
from dyad.data.cli.options import CheckOptions, ImageTask, ReadOptions
from dyad.data.shards.content_keys import content_key
from dyad.data.shards.shards import Shards, open_shards

POOL = 10  # hard negatives of a row that are too many to use all of them in a step
# Kind of data → option of `python -m data` → configuration key of a run with the same meaning
KEYS = {
    InputKind.images: {name: f"data.{name}" for name in ("relevance", "image_key", "max_image_pixels")},
    InputKind.questions: {name: f"data.{name}" for name in ("relevance", "teacher")}
    | {name: f"data.passage.{name}" for name in ("corpus", "pos_pool", "neg_pool")},
}
SOUGHT = 100  # first samples among which a sound one is sought
Held = dict[str, dict[int, str]]  # kind ("question", "caption", …) → content key → its text; "" if it was not read


def contents(values: Sequence[str], options: ReadOptions, argument: str) -> Iterator[tuple[str, Held]]:
    """Yield (location, contents) of each row of a source, in order.

    The contents are a dict: kind → content key → text. The kinds are "question" and "passage" (the right passages), or
    "picture" and "caption". The text of passages and pictures is "". values: paths or URLs. argument: name of the
    command-line argument `values`, for messages. Raises ConfigError for passages without questions and as `open_input`
    and `require_images` do, DataError for a row that cannot be read.
    """
    kind = kind_of(values, options)
    if kind is InputKind.passages:
        raise ConfigError(f"{argument}={values[0]} holds passages alone: give the file of their questions.")
    if kind is InputKind.questions:
        for where, row in open_input(values, options, argument).rows:
            if isinstance(row, BadRow):
                raise DataError(f"{where}: {row}")
            right = dict.fromkeys(row.positives.keys, "")
            yield where, {"question": {row.question.key: row.question.text}, "passage": right}
        return
    from dyad.data.image_text.sample import ShardSample  # imports torch

    require_images(values, options, argument)
    shards = open_shards(shards_of(values, options, argument))
    for i in range(len(shards)):
        sample = ShardSample.read(shards, i)
        images = {content_key(sample.image(options.image_key)): ""}
        texts = {content_key(text.encode()): text for text in captions_of(sample, options)}
        yield sample.where, {"picture": images, "caption": texts}


def captions_of(sample: Any, options: ReadOptions) -> list[str]:
    """Return the captions of a ShardSample, read from the first entry of options.captions that it has.

    Returns [] if this entry is cls (a class number), or if options.task uses no captions. Raises SampleError if the
    sample has none of the entries, or if the captions or the class number are invalid.
    """
    if options.task is not ImageTask.image_text:
        return []
    name = caption_name(sample, options)
    if name != "cls":
        return sample.captions(name, options.caption_per)
    sample.label(name)
    return []


def caption_name(sample: Any, options: ReadOptions) -> str:
    """Return the first entry of options.captions that a ShardSample has: "txt", "cls" or a json field.

    Raises SampleError when it has none, or its json member cannot be read. Whether the entry holds a usable text is not
    checked.
    """
    there = {*sample.members, *sample.fields} - {"json"}
    name = next((name for name in options.captions.split(",") if name in there), None)
    if name is None:
        has = ", ".join(sorted(there))
        raise SampleError(f"{sample.where} has no caption: captions={options.captions}, it has {has:.200}.")
    return name


def as_trained(shards: Shards, options: CheckOptions) -> CheckOptions:
    """Return the options with only one entry of options.captions: that of the first sound sample of `shards`.

    Training reads the captions of all samples under one name. The options are unchanged if none of the first SOUGHT
    samples is sound, and if options.task uses no captions.
    """
    from dyad.data.image_text.sample import ShardSample

    sought = SOUGHT if options.task is ImageTask.image_text else 0
    for i in range(min(len(shards), sought)):
        with suppress(DataError):  # bad samples are counted later
            captions_of(sample := ShardSample.read(shards, i), options)
            return replace(options, captions=caption_name(sample, options))
    return options


def train_command(
    values: Sequence[str], options: ReadOptions, paths: outputs.Paths, samples: int, split: str = "train"
) -> str:
    """Return a shell command that trains on data; for images whose captions are class numbers, a text for people.

    This text begins with "nothing". values: paths or URLs of the data, from which kind and captions are read. paths:
    configuration key, such as data.train → its value in the command. samples: number of training samples. split: the
    split of a BEIR folder to train on. Options in KEYS that differ from their defaults are part of the command. Raises
    errors as the readers of the data do.
    """
    kind = kind_of(values, options)
    changed = {name: value for name in KEYS[kind] if (value := getattr(options, name)) != getattr(ReadOptions, name)}
    paths = {**paths, **{KEYS[kind][name]: value for name, value in changed.items()}}
    if kind is InputKind.questions:
        if is_beir(values[0]):
            others = [f"data.question.split={split}"] if split != "train" else []
            return outputs.question_command(paths, samples, *others)
        rows = first_rows(values, options)
        negatives = median_low([len(row.hard_negatives) for row in rows] or [0])
        margins = all(passage.teacher == 0 for row in rows for passage in row.hard_negatives)
        # a longer list of negatives is a pool, from which each epoch draws another
        others = [f"data.negatives.per_row={negatives}"] if 1 < negatives < POOL else []
        return outputs.question_command(paths, samples, *others, negatives=negatives > 0, margins=margins)
    if options.task is not ImageTask.image_text:
        return outputs.image_command(paths, samples, options)
    from dyad.data.image_text.sample import ShardSample

    name = caption_name(ShardSample.read(open_shards(shards_of(values, options, "SOURCE")), 0), options)
    if name == "cls":
        return "nothing: class numbers alone are for task=labelled, or an evaluation, eval.suite=[wds:FOLDER]"
    return outputs.image_command(paths, samples, options, name)
