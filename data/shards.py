"""All samples of some sources under dense ids, read by offset and checked against their CRC32 every time."""

from __future__ import annotations

import os
import shlex
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from data.errors import ConfigError, DataError, SampleError
from data.index import ShardIndex, Table, fingerprint, index_shard, index_shards
from data.sources import SUFFIXES, Source
from data.storage import ReadRange, Stat, ask, open_ranges, retried

__all__ = ["ShardIndex", "Shards", "index_shard", "open_shards"]

OPEN_SHARDS = 256  # per process, two file descriptors each at most
GAP = 64 << 10  # bytes between members that are read along rather than asked for apart


def open_shards(sources: Sequence[Source], workers: int | None = None) -> Shards:
    """Index what is not indexed yet (over `workers` processes; None: all cores) and open the whole.

    Raises ConfigError for a shard that is not there, DataError when anything in any shard is broken.
    """
    indexes = list(index_shards([shard for source in sources for shard in source.shards], workers))
    broken = [index for index in indexes if index.problems]
    if broken:
        first = f"{broken[0].path}: {broken[0].problems[0]}"
        parents = shlex.join(dict.fromkeys(_listed_by(index.path) for index in broken))
        raise DataError(
            f"{len(broken)} of {len(indexes)} shards are broken. First: {first}\n"
            f"All of them are listed by: python -m data index {parents}"
        )
    return Shards(sources, indexes)


class Shards:
    """Samples 0 … len - 1 by source, shard and position. Can be pickled; every process opens files of its own."""

    def __init__(self, sources: Sequence[Source], indexes: Sequence[ShardIndex]) -> None:
        assert sum(len(source.shards) for source in sources) == len(indexes)
        self.indexes = list(indexes)
        self.weights = [source.weight for source in sources]
        self._starts = [0, *accumulate(index.samples for index in indexes)]
        firsts = [0, *accumulate(len(source.shards) for source in sources)]
        self.sizes = [self._starts[b] - self._starts[a] for a, b in pairwise(firsts)]
        self.fingerprint = fingerprint(indexes)
        self._forget_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_files()

    def locate(self, sample_id: int) -> tuple[ShardIndex, int]:
        """The shard of a sample and its row there."""
        shard = self._shard_of(sample_id)
        return self.indexes[shard], sample_id - self._starts[shard]

    def origin(self, sample_id: int) -> tuple[str, str]:
        """Path of its shard and key."""
        return self.locate(sample_id)[0].path, self.key(sample_id)

    def key(self, sample_id: int) -> str:
        shard = self._shard_of(sample_id)
        return self._opened(shard)[0].key(sample_id - self._starts[shard])

    def read(self, sample_id: int) -> dict[str, bytes]:
        """Members of a sample by suffix (lower case, without the first dot).

        Raises SampleError, naming shard, key and offset, when the bytes are not those that were indexed, also at a
        second reading; DataError when the shard as a whole is another one now or cannot be read.
        """
        shard = self._shard_of(sample_id)
        row = sample_id - self._starts[shard]
        table, read_range = self._opened(shard)
        places, index = table.places(row), self.indexes[shard]
        try:
            payloads = _payloads(read_range, places)
            if _crc32(payloads) != table.crc32(row):
                payloads = _payloads(read_range, places)
        except OSError as error:
            raise DataError(f"{self._where(shard, row)}: cannot be read: {error}") from error
        if _crc32(payloads) != table.crc32(row):
            if _asked(index) != (index.size, index.mtime):
                raise _changed(index)
            raise SampleError(f"{self._where(shard, row)}: its CRC32 is not as indexed: the shard is damaged.")
        return {index.suffixes[number]: payload for (_, _, number), payload in zip(places, payloads, strict=True)}

    def _shard_of(self, sample_id: int) -> int:
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample id {sample_id} is not in [0, {len(self)})")
        return bisect_right(self._starts, sample_id) - 1

    def _where(self, shard: int, row: int) -> str:
        table = self._opened(shard)[0]
        return f"{self.indexes[shard].path}: sample '{table.key(row)}' at offset {table.places(row)[0][0]}"

    def _opened(self, shard: int) -> tuple[Table, ReadRange]:
        if self._process != os.getpid():  # forked: a file or connection of the parent is not ours
            self._forget_files()
        return self._open(shard)

    def _forget_files(self) -> None:
        self._process = os.getpid()
        self._open = lru_cache(maxsize=OPEN_SHARDS)(lambda shard: _open_shard(self.indexes[shard]))


def _listed_by(path: str) -> str:
    """What `data index` must be told to list a file: its folder, where that means files of this kind."""
    return os.path.dirname(path) or "." if path.endswith(SUFFIXES) else path


def _open_shard(index: ShardIndex) -> tuple[Table, ReadRange]:
    if _asked(index).size != index.size:  # what only its time stamp tells, the CRC32 of each sample tells better
        raise _changed(index)
    try:
        return index.table(), retried(lambda: open_ranges(index.path))
    except (ConfigError, OSError) as error:
        raise DataError(_gone(index, error)) from error


def _asked(index: ShardIndex) -> Stat:
    """What the file is now."""
    try:
        return retried(lambda: ask(index.path))
    except (ConfigError, OSError) as error:
        raise DataError(_gone(index, error)) from error


def _changed(index: ShardIndex) -> DataError:
    return DataError(f"shard {index.path} has changed since it was indexed. Start again to index it anew.")


def _gone(index: ShardIndex, error: Exception) -> str:
    return f"shard {index.path} was there when it was indexed and cannot be opened now: {error}"


def _payloads(read_range: ReadRange, places: list[tuple[int, int, int]]) -> list[bytes]:
    """The members' bytes: in one read when they lie together, as they nearly always do."""
    start, end = places[0][0], places[-1][0] + places[-1][1]
    if end - start > sum(size for _, size, _ in places) + GAP:
        return [read_range(offset, offset + size) for offset, size, _ in places]
    span = read_range(start, end)
    return [span[offset - start : offset - start + size] for offset, size, _ in places]


def _crc32(payloads: list[bytes]) -> int:
    crc = 0
    for payload in payloads:
        crc = zlib.crc32(payload, crc)
    return crc
