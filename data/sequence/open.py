"""Open the sequences that a configuration names: the log or the frames, and the items."""

from collections.abc import Sequence
from typing import Any

from dyad.data.config import DataConfig, ItemKind
from dyad.data.sequence.files import sequence_files
from dyad.data.sequence.frames import Frames, frame_files
from dyad.data.sequence.items import CatalogueItems, ItemFrames, ItemNumbers, images_of_items, texts_of_items
from dyad.data.sequence.log import Log, read_log


def open_log(value: Any, config: DataConfig, known: Sequence[str] = ()) -> Log:
    """Read the log that `value` names. known: ids of items that are numbered first. Errors as of `read_log`."""
    return read_log(sequence_files(value, config), config.sequence, known)


def items_of(names: Sequence[str], config: DataConfig, model: Any) -> CatalogueItems:
    """Open the items with the ids `names`. model: its tokenizer, or the size of its images. Raises DataError."""
    if config.items is ItemKind.texts:
        return texts_of_items(names, model.tokenize, config)
    if config.items is ItemKind.pictures:
        return images_of_items(names, model.image, config)
    return ItemNumbers(names)


def open_sequences(config: DataConfig, model: Any) -> tuple[Log, CatalogueItems]:
    """Open the training data of task=sequence: its events, and the items that they name."""
    if config.items is ItemKind.frames:
        frames = Frames(frame_files(config.train))
        return frames.log(), ItemFrames(frames)
    log = open_log(config.train, config)
    return log, items_of(log.items, config, model)


def known_ids(config: DataConfig, exported: Sequence[str], inputs: int | None) -> Sequence[str]:
    """Return the ids of items that a model has embeddings of: those of its export, or else of its training log.

    inputs: how many, of a model of ids. Errors as of `read_log`.
    """
    return exported or open_log(config.train, config).items[:inputs]


def inputs_of(config: DataConfig) -> int:
    """Return the number of items of data.train, or the number of features of its frames."""
    if config.items is ItemKind.frames:
        return Frames(frame_files(config.train)).width
    return len(open_log(config.train, config).items)
