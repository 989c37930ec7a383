"""Make, store and read the index of a shard, which has the byte offset of each sample. One scan of the shard makes it.

`.index/<shard>.json` describes the shard (name, size, time stamp, SHA-256, count of samples, errors found) and names an
`.npy` file. This file holds a table with the byte offset, CRC32 and key (name or line number) of each sample; it is
read without unpickling. The file name of the table holds its digest, and the JSON is written last and atomically,
so that a reader finds a complete index or none. Each shard has an index of its own, so any selection of shards can be
opened without a scan. The JSON carries seals: hashes which prove that this user, or a process in this very folder, made
the index (see index_cache.py). An index without a valid seal is made anew.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import DataError
from dyad.data.base.parallel import parallel_map
from dyad.data.shards.content_keys import json_digest
from dyad.data.shards.index_cache import cache_folders, read_cached, write_cached
from dyad.data.shards.scan_rows import RowScan, scan_array, scan_lines, scan_table
from dyad.data.shards.scan_tar import MAX_BYTES, Problem, Scan, scan_tar
from dyad.data.shards.storage import Stat, open_buffered, read_errors, shard_name, stat, suffix_of
from dyad.data.shards.text_files import BUFFER, skip_mark

FORMAT = 2
LARGEST = max(MAX_BYTES.values())
STATS_AT_ONCE = 16  # threads that call `stat`, because a call for a remote file takes a round trip
BYTES_PER_PROCESS = 64 << 20  # a scan of fewer bytes ends before a new process has started
ROW_SCANS: dict[str, Callable[[Any, int], RowScan]] = {".jsonl": scan_lines, ".json": scan_array, ".tsv": scan_table}

# One row per sample: `member` and `key` are the starts of its members and key. A last row holds the ends of the ranges.
ROW = np.dtype([("crc32", "<u4"), ("member", "<u4"), ("key", "<u4")])
MEMBER = np.dtype([("offset", "<i8"), ("size", "<u4"), ("suffix", "<u2")])


@dataclass(frozen=True)
class OffsetTable:
    """A table with the place of each sample of a shard in its file, memory-mapped.

    index: the shard's index. rows: (samples + 1,) of dtype ROW, for each sample its CRC32 and the indices where its
    entries in `members` and `keys` begin; the last row has the lengths of both. members: (members,) of dtype MEMBER,
    the byte offset, size and suffix of each member (a file of a sample). keys: the UTF-8 bytes of all keys, one after
    the other. Another user may have made the table, so offsets and sizes may be wrong: they are checked whenever a row
    is read, not when the table is opened, so that opening takes no time.
    """

    index: "ShardIndex"
    rows: np.ndarray
    members: np.ndarray
    keys: np.ndarray

    def member_ranges(self, row: int) -> list[tuple[int, int, int]]:
        """Return (byte offset, size in bytes, suffix number) of each member (file) of one sample, in file order.

        The suffix number is an index in `self.index.suffixes`. row: index of the sample in the shard, from 0. Raises
        DataError when the sample has no members, or when a member has an unknown suffix, lies outside the shard or is
        larger than LARGEST bytes.
        """
        found = self.members[int(self.rows[row]["member"]) : int(self.rows[row + 1]["member"])].tolist()
        ends, suffixes = self.index.size, len(self.index.suffixes)
        if not found or not all(0 <= o <= ends - size and size <= LARGEST and n < suffixes for o, size, n in found):
            raise self.index.damaged(f"row {row} leads nowhere")
        return found

    def key(self, row: int) -> str:
        """Return the key of one sample of a shard. row: index of the sample in the shard, from 0.

        In a tar the key is its name without suffix, in a file of rows its line or row number as text. Bytes that are
        not UTF-8 are replaced.
        """
        found = self.keys[int(self.rows[row]["key"]) : int(self.rows[row + 1]["key"])]
        return found.tobytes().decode("utf-8", "replace")


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard: a description of the file, its errors, and the path of the table of sample offsets.

    path, name, size (bytes), sha256: of the shard. mtime: its time stamp, as Stat.mtime.
    samples, members: number of samples and of members (files of a sample). suffixes: all suffixes of members. ignored:
    number of skipped members by suffix. problems: the first errors found; problem_count: the number of all errors.
    table_file: path of the table of offsets.
    """

    path: str
    name: str
    size: int
    mtime: str
    sha256: str
    samples: int
    members: int
    suffixes: tuple[str, ...]
    ignored: dict[str, int]
    problem_count: int
    problems: tuple[Problem, ...]
    table_file: str

    def table(self) -> OffsetTable:
        """Memory-map the stored table of the byte offsets of all samples of this shard and return it.

        Raises DataError when the table's file is damaged or missing.
        """
        try:
            raw = np.asarray(map_array(self.table_file, Path(self.table_file).parent))
            end = (self.samples + 1) * ROW.itemsize
            rows, members, keys = np.split(raw, [end, end + self.members * MEMBER.itemsize])
            return OffsetTable(self, rows.view(ROW), members.view(MEMBER), keys)
        except (OSError, ValueError) as error:
            raise self.damaged(error) from error

    def damaged(self, how: object) -> DataError:
        """Return, for the caller to raise, a DataError which says that the stored index of this shard is damaged.

        how: the kind of damage, a text or an exception.
        """
        return DataError(f"{self.table_file}: the index of {self.path} is damaged ({how}); delete it.")


def stored_index(path: str) -> ShardIndex | None:
    """Return the stored index of the shard at `path`; None if none is stored, or if it is no longer valid.

    It is not valid if the shard has changed since (size or time stamp), or without a valid seal (index_cache.py).
    Nothing is scanned. Raises ConfigError when the shard does not exist, DataError when storage fails.
    """
    return _load(path, stat(path))


def has_index(path: str) -> bool:
    """Whether an index of the shard at `path` is stored, valid or not. The shard itself is not looked at."""
    return any((folder / f"{shard_name(path)}.json").is_file() for folder in cache_folders(path))


def index_shards(paths: Sequence[str], workers: int | None = None) -> Iterator[ShardIndex]:
    """Yield the index of each shard, in the order of `paths`.

    Shards without a stored index, or changed since they were indexed, are scanned first, and the new index is stored,
    in `.index/` beside the shard or in the user's cache. workers: the most processes that scan; None: one per core.
    Raises ConfigError when a shard does not exist, and DataError when it cannot be read, a text file is not UTF-8 or no
    index can be stored. Other errors inside a shard are not raised; the field `problems` of its index lists them: the
    caller must look.
    """
    with ThreadPoolExecutor(STATS_AT_ONCE) as threads:
        stats = dict(zip(paths, threads.map(stat, paths), strict=True))
    stored = {path: index for path in paths if (index := _load(path, stats[path]))}
    stale = [path for path in paths if path not in stored]
    useful = sum(stats[path].size for path in stale) // BYTES_PER_PROCESS
    with parallel_map(workers, min(len(stale), useful)) as run_all:
        scanned = iter(run_all(_scan, stale, [stats[path] for path in stale]))
        yield from (stored.get(path) or next(scanned) for path in paths)


def fingerprint(indexes: Iterable[ShardIndex]) -> str:
    """Return a SHA-256, in hexadecimal digits, over the names, sizes, contents and sample counts of shards, in order.

    It does not depend on their folders, so copies in another folder have the same fingerprint.
    """
    return json_digest([[index.name, index.size, index.sha256, index.samples] for index in indexes])


# ---- scanning ------------------------------------------------------------------------------------------------------


class _Hashing(RawIOBase):
    """A stream that computes the SHA-256 of all bytes read through it. raw: the stream of the file at `path`. Raises
    DataError when a read fails."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self.raw, self.path, self.sha256 = raw, path, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with read_errors(self.path):
            count = self.raw.readinto(buffer)  # type: ignore[attr-defined]
        self.sha256.update(memoryview(buffer)[:count])
        return count


def scan_stream(stream: "BufferedReader[Any]", path: str) -> Scan | RowScan:
    """Scan a shard and return the samples and errors found; errors inside it are not raised.

    stream: the bytes of the shard, at their start. path: path of the shard; its suffix determines the format, and other
    suffixes than those of rows mean a tar. Raises DataError for a text file that is not UTF-8.
    """
    scan_rows = ROW_SCANS.get(suffix_of(path))
    return scan_rows(stream, skip_mark(stream, path)) if scan_rows else scan_tar(stream)


def _scan(path: str, found: Stat) -> ShardIndex:
    """Scan the shard at `path`, store its index and return the index. found: size and time stamp of the shard before
    the scan, stored in the index to notice later changes of the shard. Raises DataError for text that is not UTF-8,
    when a read fails, and when the index cannot be stored."""
    with open_buffered(path) as raw:
        hashing = _Hashing(raw, path)
        stream = BufferedReader(hashing, BUFFER)
        scan = scan_stream(stream, path)
        while stream.read(1 << 20):  # a scan may stop early; the digest is that of the whole file
            pass
    return _store(path, found, scan, hashing.sha256.hexdigest())


# ---- storing -------------------------------------------------------------------------------------------------------


def _load(path: str, found: Stat) -> ShardIndex | None:
    """Return the stored index of the shard at `path`, None if there is no valid one. found: the shard's present
    state."""
    wanted = {"name": shard_name(path), "format": FORMAT, **found._asdict()}
    for table, facts in read_cached(path, shard_name(path), wanted):
        values = facts | {"path": path, "table_file": str(table), "suffixes": tuple(facts["suffixes"])}
        values["problems"] = tuple(Problem(**problem) for problem in facts["problems"])
        return ShardIndex(**{field.name: values[field.name] for field in fields(ShardIndex)})
    return None


def _store(path: str, found: Stat, scan: Scan | RowScan, sha256: str) -> ShardIndex:
    """Write the table of offsets and the description of a scanned shard into the index cache, and return the index.
    found: the shard's size and time stamp; scan: the result of its scan; sha256: of the whole file."""
    if isinstance(scan, RowScan):  # computed without an object per row: there may be tens of millions
        suffixes, crc32, counts = [scan.suffix], np.asarray(scan.crc32), np.ones(len(scan.crc32), np.uint32)
        numbers = np.asarray(scan.key).astype("S12")
        key_sizes, keys = np.strings.str_len(numbers), numbers.tobytes().replace(b"\0", b"")
        members = np.zeros(len(crc32), MEMBER)
        members["offset"], members["size"] = scan.offset, scan.size
    else:
        samples, texts = scan.samples, [sample.key.encode("utf-8") for sample in scan.samples]
        suffixes = sorted(scan.suffixes)
        crc32 = np.array([sample.crc32 for sample in samples], np.uint32)
        counts = np.array([len(sample.members) for sample in samples], np.uint32)
        key_sizes, keys = np.array([len(text) for text in texts], np.uint32), b"".join(texts)
        number = {suffix: i for i, suffix in enumerate(suffixes)}
        members = np.array([(at, size, number[s]) for sample in samples for s, at, size in sample.members], MEMBER)
    rows = np.zeros(len(crc32) + 1, ROW)
    rows["crc32"][:-1] = crc32
    rows["member"][1:], rows["key"][1:] = np.cumsum(counts), np.cumsum(key_sizes)
    ignored = {} if isinstance(scan, RowScan) else dict(sorted(scan.ignored.items()))
    file, problems = (path, shard_name(path), found.size, found.mtime, sha256), tuple(scan.problems.first)
    content = (len(crc32), len(members), tuple(suffixes), ignored)
    index = ShardIndex(*file, *content, scan.problems.count, problems, table_file="")
    facts = {"format": FORMAT, **asdict(index)}
    del facts["path"], facts["table_file"]  # both depend on the folder
    table = np.frombuffer(b"".join((rows.data, members.data, keys)), np.uint8)
    return replace(index, table_file=str(write_cached(path, index.name, facts, table)))
