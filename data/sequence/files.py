"""The files of sequences that a configuration names. Imports no torch: a mistake is refused at once."""

from typing import Any

from dyad.data.base.errors import ConfigError
from dyad.data.config import DataConfig, ItemKind
from dyad.data.sequence.frames import frame_files
from dyad.data.sequence.log import check_columns, log_files


def sequence_files(value: Any, config: DataConfig, key: str = "data.train") -> list[str]:
    """Return the files of sequences that `value` names: logs, or .npy files of frames. key: for messages. Raises
    ConfigError for none, and for a log without the columns of data.sequence.*."""
    if config.items is ItemKind.frames:
        return frame_files(value, key)
    if config.items is ItemKind.pictures and config.sequence.items is None:
        raise ConfigError("data.sequence.items is missing: shards with an image of each item, whose key is the id")
    files = log_files(value, key)
    for file in files:
        check_columns(file, config.sequence)
    return files
