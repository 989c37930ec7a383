"""Read sequences with class labels, on which the contexts of a model are evaluated by linear probes.

The class of a user is a column of the log, equal in all rows of the user. The class of a file of frames, x.npy, is a
field of the JSON file x.json beside it: one class, which its last frame gets, or a list with the class of each frame
and null for frames without a class (van den Oord et al. 2018, section 3.1).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyad.data.base.errors import BadRow, ConfigError, DataError, nearest, sound
from dyad.data.base.json_text import read_json
from dyad.data.config import DataConfig, ItemKind
from dyad.data.image_text.items import LabelledSet
from dyad.data.question_passage.fields import label_of
from dyad.data.sequence.frames import Frames
from dyad.data.sequence.histories import Histories
from dyad.data.sequence.items import ItemFrames
from dyad.data.sequence.log import Log, id_of, read_log
from dyad.data.sequence.open import items_of
from dyad.data.shards.content_keys import Int64s, content_key
from dyad.data.tables.readers import open_table


def labelled_sequences(
    paths: Sequence[str], config: DataConfig, model: Any, label: str, known: Sequence[str] = ()
) -> LabelledSet:
    """Return the labelled histories in the files at `paths`. The keys of the result are hashes of the names of the
    users.

    A log gives one history for each user, all events, with the user's class; a file of frames (a user) gives one for
    each frame that has a class, the frames up to it. model: has the attributes `tokenize` and `image` that `items_of`
    uses. label: the column or field with the class. known: if items are ids, the ids that have an embedding in the
    model; otherwise (). Raises DataError for a row or JSON file in which this field is missing or null, for two classes
    of a user, and for a user without a known item.
    """
    if config.items is ItemKind.frames:
        frames = Frames(paths)
        log, items = frames.as_log(), ItemFrames(frames)
        stops, labels = _classes_of_frames(frames, label)
    else:
        log = read_log(paths, config.sequence, known)
        items = items_of(known or log.items, config, model)
        stops, labels = log.starts[1:], _classes_of_users(log, paths, config.sequence.user, label)
    histories = Histories(log, stops, items, config.sequence.length)
    for i in range(len(histories)):
        if not len(histories.before(i)):
            raise DataError(f"{paths[0]}: the model knows no item of '{log.users[i]:.80}'. Leave its events out")
    user_keys = np.array([content_key(user.encode()) for user in log.users], np.int64)
    return LabelledSet(histories, labels, user_keys[histories.user_n])


def check_label(paths: Sequence[str], config: DataConfig, label: str, key: str) -> None:
    """Raise ConfigError if a log lacks the column `label`, or a file of frames lacks its JSON file (x.json of x.npy).

    The content of the JSON file is not checked. key: the configuration key of `paths`, for the message.
    """
    for path in paths:
        if config.items is ItemKind.frames:
            if not _beside(path).is_file():
                raise ConfigError(f"{key}={path}: {_beside(path)} is missing, a JSON object with '{label}', its class")
        elif label not in (columns := open_table(path).columns):
            there = f"It has {', '.join(columns[:10])}"
            raise ConfigError(f"{key}: {path} has no column '{label}'.{nearest(label, columns)} {there}")


def _classes_of_users(log: Log, paths: Sequence[str], user: str, label: str) -> list[str]:
    classes: dict[str, str] = {}
    for path in paths:
        for where, row in open_table(path).rows():
            try:
                row = sound(row)
                name, own = id_of(row, user), label_of(row, label)
                if own != (first := classes.setdefault(name, own)):
                    raise BadRow("two classes", f"{label} of '{name:.80}' is '{own:.80}', before '{first:.80}'")
            except BadRow as bad:
                raise DataError(f"{path}: {where}: {bad}") from bad
    return [classes[name] for name in log.users]


def _classes_of_frames(frames: Frames, label: str) -> tuple[Int64s, list[str]]:
    """Return the n frames that have a class, and the list of their classes.

    A frame is given as the number of the frame after it, int64 (n,). If the field is no list, its value is the class of
    the last frame. Raises DataError if the field is missing or null, and for a list of another length than the file.
    """
    stops, classes = [], []
    for path, start, stop in zip(frames.paths, frames.starts[:-1].tolist(), frames.starts[1:].tolist(), strict=True):
        value = _field(_beside(path), label)
        own = value if isinstance(value, list) else [None] * (stop - start - 1) + [value]
        if len(own) != stop - start:
            raise DataError(f"{_beside(path)}: '{label}' has {len(own):,} entries for {stop - start:,} frames")
        known = [place for place, name in enumerate(own) if name is not None]
        stops += [start + place + 1 for place in known]
        classes += [str(own[place]) for place in known]
    return np.array(stops, np.int64), classes


def _field(path: Path, name: str) -> Any:
    try:
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ValueError(f"is no object with '{name}'")
        label_of(fields, name)
        return fields[name]
    except (OSError, ValueError, BadRow) as error:
        raise DataError(f"{path}: {error}") from error


def _beside(path: str) -> Path:
    return Path(path).with_suffix(".json")
