"""Open the sequences that a configuration names: the log of events or the frames, and the items."""

from collections.abc import Sequence
from typing import Any

from dyad.data.config import DataConfig, ItemKind
from dyad.data.sequence.files import sequence_files
from dyad.data.sequence.frames import Frames, frame_files
from dyad.data.sequence.items import CatalogueItems, ItemFrames, ItemNumbers, images_of_items, texts_of_items
from dyad.data.sequence.log import Log, read_log


def open_log(config: DataConfig) -> Log:
    """Read the log of events in data.train. Not for frames. Raises ConfigError as `sequence_files` does, and DataError,
    naming the row, for an event without valid values."""
    return read_log(sequence_files(config.train, config), config.sequence)


def items_of(names: Sequence[str], config: DataConfig, model: Any) -> CatalogueItems:
    """Open the items with the ids `names`, of the kind data.items: texts, images, or ids alone; not frames.

    model: an object with the attribute `tokenize` (the tokenizer) for texts, `image` (an ImageSpec) for images; not
    used for ids. Raises DataError for an id without a text or image.
    """
    if config.items is ItemKind.texts:
        return texts_of_items(names, model.tokenize, config)
    if config.items is ItemKind.pictures:
        return images_of_items(names, model.image, config)
    return ItemNumbers(names)


def open_sequences(config: DataConfig, model: Any) -> tuple[Log, CatalogueItems]:
    """Open the training data of task=sequence: return the events, and their items. model: as in `items_of`. Raises
    ConfigError if files or columns are missing, and DataError for data that cannot be read."""
    if config.items is ItemKind.frames:
        frames = Frames(frame_files(config.train))
        return frames.as_log(), ItemFrames(frames)
    log = open_log(config)
    return log, items_of(log.items, config, model)


def known_ids(config: DataConfig, exported: Sequence[str], inputs: int | None) -> Sequence[str]:
    """Return the ids of the items that have an embedding in a model. They are `exported`, the ids stored in an exported
    model, or, if it is empty, the ids in the training log, which is then read.

    inputs: how many of the ids in the training log are returned, the first ones: as many as the model has embeddings;
    None: all. Raises ConfigError and DataError as `open_log` does.
    """
    return exported or open_log(config).items[:inputs]


def input_size(config: DataConfig) -> int:
    """Return the size of the input of an item tower: the number of items in data.train, or of features of a frame.

    Reads the whole log, or the headers of the files of frames. Raises ConfigError and DataError as `open_sequences`
    does.
    """
    if config.items is ItemKind.frames:
        return Frames(frame_files(config.train)).width
    return len(open_log(config).items)
