"""Find and check the files of sequences that a configuration names. Imports no torch, so mistakes are reported fast."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, ItemKind
from dyad.data.sequence.frames import frame_files
from dyad.data.sequence.log import check_columns, log_files
from dyad.data.tables.readers import open_table


def sequence_files(value: Any, config: DataConfig, key: str = "data.train") -> list[str]:
    """Return the paths of the files of sequences that `value` names, in the syntax of data.train.

    They are .npy files of frames if config.items is frames, otherwise logs of events. key: the configuration key of
    `value`, for messages. Raises ConfigError if `value` names no file, for a sampling weight (path@2), for a URL, for a
    log without the columns that data.sequence.* names, and for items that are images when data.sequence.items is not
    set. Raises DataError for a log whose columns cannot be read. Frames are not read.
    """
    if config.items is ItemKind.frames:
        return frame_files(value, key)
    if config.items is ItemKind.pictures and config.sequence.items is None:
        raise ConfigError(
            "data.sequence.items is missing: shards with an image of each item, whose key is the id. If items are ids "
            "alone, set data=log; if texts, data.items=texts"
        )
    files = log_files(value, key)
    for file in files:
        check_columns(open_table(file), config.sequence)
    return files


def events_left_out(evaluated: Sequence[str], before: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each file test.jsonl in `evaluated` whose val.jsonl, in the same folder, is in no history.

    `python -m data sequences` writes both files. before: the other files of events.
    """
    known = {Path(file).resolve() for file in (*before, *evaluated)}
    for file in map(Path, evaluated):
        between = file.with_name("val.jsonl")
        if file.name == "test.jsonl" and between.exists() and between.resolve() not in known:
            yield (
                f"warning: {between} is in no history of {file}. Set data.sequence.earlier={between} for training, "
                f"val={between} for python -m eval"
            )
