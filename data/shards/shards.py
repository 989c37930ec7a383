"""Random access to all samples of several sources by sample id (0 … n - 1). Each read is checked against a stored
CRC32."""

import os
import shlex
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import TypeVar

from dyad.data.base.errors import ConfigError, DataError, SampleError
from dyad.data.shards.index import OffsetTable, ShardIndex, fingerprint, index_shards
from dyad.data.shards.index_cache import made_from
from dyad.data.shards.sources import SHARDS, ShardSource
from dyad.data.shards.storage import ReadRange, Stat, open_ranges, read_stat, with_retries

T = TypeVar("T")

OPEN_SHARDS = 256  # the most open shards of a process, each with at most two file descriptors
NAMED = 4  # the most broken shards that a command names one by one; for more it names their folder
GAP = 64 << 10  # the most bytes between the members of a sample that are read with them in one call


def open_shards(sources: Sequence[ShardSource], workers: int | None = None) -> "Shards":
    """Open all shards of the sources for reading by sample id; shards without an index are indexed first.

    workers: the most processes that do this; None: one per core. Raises ConfigError for a shard that does not exist,
    DataError when any shard has an error, even in a single sample.
    """
    indexes = list(index_shards([shard for source in sources for shard in source.shards], workers))
    if broken := [index for index in indexes if index.problems]:
        first = f"{broken[0].path}: {broken[0].problems[0]}"
        hint = f"All of them are listed by: python -m data index {shlex.join(_named(broken))}{how_to_mend(broken)}"
        raise DataError(f"{len(broken)} of {len(indexes)} shards are broken. First: {first}\n{hint}")
    return Shards(sources, indexes)


def how_to_mend(broken: Sequence[ShardIndex]) -> str:
    """Return the end of a message about broken shards: a line with the command that packs their samples anew.

    The result is "" if no broken shard is a tar; else it begins with a newline.
    """
    tars = [index for index in broken if index.name.endswith(".tar")]
    if not tars:
        return ""
    out = f"out={tars[0].name.removesuffix('.tar')}_packed"
    command = shlex.join(["python", "-m", "data", "pack", "::".join(_named(tars)), out, "on_error=skip"])
    return f"\nTheir sound samples are packed anew, in order, by: {command}"


def _named(broken: Sequence[ShardIndex]) -> list[str]:
    """Return the paths for a command about broken shards: the path of each if there are at most NAMED.

    For more: the folders of tar and .jsonl shards, each once, and the paths of other files.
    """
    if len(broken) <= NAMED:
        return [index.path for index in broken]
    return [*dict.fromkeys(os.path.dirname(i.path) or "." if i.path.endswith(SHARDS) else i.path for i in broken)]


class Shards:
    """Random access to the samples of several sources by sample id, 0 … len - 1.

    The ids are ordered by source, shard and position in the shard. Can be pickled; each process opens its own files,
    when it first reads a shard. Errors that the indexes list are not checked: `open_shards` does so. indexes: the index
    of each shard of all sources, in order. sizes, weights: number of samples and weight of each source. fingerprint: a
    hash of the names and contents of the shards.
    """

    def __init__(self, sources: Sequence[ShardSource], indexes: Sequence[ShardIndex]) -> None:
        assert sum(len(source.shards) for source in sources) == len(indexes)
        self.sources, self.indexes = list(sources), list(indexes)
        self.weights = [source.weight for source in sources]
        self._starts = [0, *accumulate(index.samples for index in indexes)]
        firsts = [0, *accumulate(len(source.shards) for source in sources)]
        self.sizes = [self._starts[b] - self._starts[a] for a, b in pairwise(firsts)]
        self.fingerprint = fingerprint(indexes)
        self._forget_files()

    def __len__(self) -> int:
        return self._starts[-1]

    def __reduce__(self) -> tuple[type["Shards"], tuple[list[ShardSource], list[ShardIndex]]]:
        return Shards, (self.sources, self.indexes)  # without the open files

    def locate(self, sample_id: int) -> tuple[ShardIndex, int]:
        """Return the ShardIndex of the shard that holds a sample, and the sample's position in that shard, from 0.

        Raises IndexError for an id outside 0 … len - 1.
        """
        shard, row = self._position(sample_id)
        return self.indexes[shard], row

    def origin(self, sample_id: int) -> tuple[str, str]:
        """Return the path of the shard that holds a sample, and the sample's key. If the shard was made of a table of
        images, they are the path of the table and the place in it. Errors as of `key`."""
        return made_from(self.locate(sample_id)[0].path, self.key(sample_id))

    def key(self, sample_id: int) -> str:
        """Return the key of a sample as text: in a tar shard its name without suffix, else its line or row number.

        Raises DataError when the shard or its index has changed or cannot be opened, IndexError for an id outside 0 …
        len - 1.
        """
        shard, row = self._position(sample_id)
        return self._opened(shard)[0].key(row)

    def read(self, sample_id: int) -> dict[str, bytes]:
        """Read a sample and return its members: suffix (lower case, without the first dot) -> bytes.

        Raises SampleError, naming shard, key and offset, when the CRC32 of the bytes differs from the stored one in two
        reads; DataError when the shard has changed or cannot be read, or its index is damaged; IndexError for an id
        outside 0 … len - 1.
        """
        shard, row = self._position(sample_id)
        table, read_range = self._opened(shard)
        ranges, index = table.member_ranges(row), self.indexes[shard]
        for _ in range(2):  # a storage error may be gone at the second read
            try:
                payloads = _payloads(read_range, ranges)
            except OSError as error:
                raise DataError(f"{self._where(shard, row)}: cannot be read: {error}") from error
            if reduce(lambda crc, content: zlib.crc32(content, crc), payloads, 0) == table.rows[row]["crc32"]:
                return dict(zip((index.suffixes[number] for _, _, number in ranges), payloads, strict=True))
        if _stat_now(index) != (index.size, index.mtime):
            raise _changed(index)
        raise SampleError(f"{self._where(shard, row)}: its CRC32 is not as indexed: the shard is damaged.")

    def _position(self, sample_id: int) -> tuple[int, int]:
        """Return the index in `self.indexes` of a sample's shard, and the sample's position in that shard.

        Raises IndexError for an id outside 0 … len - 1.
        """
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample id {sample_id} is not in [0, {len(self)})")
        shard = bisect_right(self._starts, sample_id) - 1
        return shard, sample_id - self._starts[shard]

    def _where(self, shard: int, row: int) -> str:
        table = self._opened(shard)[0]
        return f"{self.indexes[shard].path}: sample '{table.key(row)}' at offset {table.member_ranges(row)[0][0]}"

    def _opened(self, shard: int) -> tuple[OffsetTable, ReadRange]:
        if self._process != os.getpid():  # after a fork: the parent's files and connections must not be used
            self._forget_files()
        return self._open(shard)

    def _forget_files(self) -> None:
        """Replace the cache of open shards by an empty one for this process. A forked process needs this, because it
        must not use its parent's files and connections. The files in the old cache are closed by their destructors."""
        self._process = os.getpid()
        self._open = lru_cache(maxsize=OPEN_SHARDS)(lambda shard: _open_shard(self.indexes[shard]))


def _open_shard(index: ShardIndex) -> tuple[OffsetTable, ReadRange]:
    """Return the table of offsets of a shard and a function that reads byte ranges of it. Errors as of `Shards.key`."""
    if _stat_now(index).size != index.size:  # the time stamp is not compared: the CRC32 of each sample says more
        raise _changed(index)
    return index.table(), _try_open(index, lambda: open_ranges(index.path))


def _stat_now(index: ShardIndex) -> Stat:
    return _try_open(index, lambda: read_stat(index.path))


def _try_open(index: ShardIndex, action: Callable[[], T]) -> T:
    """Return action(), repeated if storage fails; raise DataError in place of its last ConfigError or OSError."""
    try:
        return with_retries(action)
    except (ConfigError, OSError) as error:
        reason = f"shard {index.path} was there when it was indexed and cannot be opened now: {error}"
        raise DataError(reason) from error


def _changed(index: ShardIndex) -> DataError:
    return DataError(f"shard {index.path} has changed since it was indexed. Start again to index it anew.")


def _payloads(read_range: ReadRange, ranges: list[tuple[int, int, int]]) -> list[bytes]:
    """Read the bytes of each member (file) of one sample, in the order of `ranges`.

    read_range(start, end): returns the bytes start … end - 1 of the shard. ranges: (byte offset, size, suffix number)
    of each member; the number is not used. Members with at most GAP bytes between them in all are read by one call.
    """
    start, end = ranges[0][0], ranges[-1][0] + ranges[-1][1]
    if end - start > sum(size for _, size, _ in ranges) + GAP:
        return [read_range(offset, offset + size) for offset, size, _ in ranges]
    span = read_range(start, end)
    return [span[offset - start : offset - start + size] for offset, size, _ in ranges]
