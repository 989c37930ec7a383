"""Read sequences of frames (feature vectors, such as those of a speech or video encoder) from .npy files.

Each file is one sequence, (T, F) float16, float32 or float64. Frames are numbered from 0 through all files.

Shape letters: T frames of a file; F features; k frames to read; U files.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import ConfigError, DataError
from dyad.data.sequence.log import Log
from dyad.data.shards.content_keys import Int64s
from dyad.data.shards.manifest import FileEntry
from dyad.data.shards.sources import unweighted_files
from dyad.data.shards.storage import scheme_of, sha256_of

SUFFIX = (".npy",)


def frame_files(value: Any, key: str = "data.train") -> list[str]:
    """Return the paths of the .npy files that `value` names, in the syntax of data.train. key: the configuration key of
    `value`, for messages. Raises ConfigError if there is no file, for a sampling weight (path@2), and for a URL."""
    files = unweighted_files(value, key, SUFFIX, "the sequences of frames have no weights. Leave @ out")
    if remote := next(filter(scheme_of, files), None):
        raise ConfigError(f"{key}={remote}: frames are read from files of this machine. Download them first")
    return files


class Frames:
    """The frames of U files, read by their numbers. width: number F of features. starts (U + 1,) int64: the number of
    the first frame of each file; the last entry is the number of all frames.

    The constructor raises DataError for a file that is no array (T, F) of floats, or has another F than the first file.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        shapes = [self._opened(path).shape for path in paths]
        self.width = shapes[0][1]
        for path, shape in zip(paths, shapes, strict=True):
            if shape[1] != self.width:
                raise DataError(f"{path}: its frames have {shape[1]} features, those of {paths[0]} {self.width}")
        self.starts = np.concatenate([[0], np.cumsum([steps for steps, _ in shapes], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, numbers_k: Int64s) -> np.ndarray:
        """Return the frames with the given numbers, float32 (k, F). numbers_k (k,): numbers through all files, from 0,
        in any order. Raises DataError for a value that is not finite."""
        found = np.empty((len(numbers_k), self.width), np.float32)
        file_k = np.searchsorted(self.starts, numbers_k, side="right") - 1
        for file in np.unique(file_k).tolist():
            own = file_k == file
            found[own] = self._opened(self.paths[file])[numbers_k[own] - self.starts[file]]
            if not np.isfinite(found[own]).all():
                raise DataError(f"{self.paths[file]}: has a value that is not finite")
        return found

    @cached_property
    def digests(self) -> list[str]:
        """The SHA-256 of each file. All files are read once."""
        return [sha256_of(path) for path in self.paths]

    def as_log(self) -> Log:
        """Return a Log in which each frame is an event, and the frames of a file are one sequence.

        The item and the time of an event are the number of the frame, from 0 over all files. Users are the names of the
        files, without their folders; `items` is empty, as frames have no ids. Reads all files, for their SHA-256.
        """
        found = zip(self.paths, self.digests, strict=True)
        files = [FileEntry(os.path.basename(path), os.path.getsize(path), 1, digest) for path, digest in found]
        file_e = np.repeat(np.arange(len(self.paths)), np.diff(self.starts))
        numbers = np.arange(len(self))
        return Log(numbers, file_e, numbers.astype(np.float64), self.starts, [e.name for e in files], [], files)

    def _opened(self, path: str) -> np.ndarray:
        try:
            array = map_array(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as .npy: {error}") from error
        if array.ndim != 2 or array.dtype.kind != "f" or not array.size:
            raise DataError(f"{path}: is {array.dtype} {array.shape}, not frames: floats (steps, features)")
        return array
