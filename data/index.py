"""The index of a shard: made by one scan, kept beside the shard, read without unpickling anything.

`.index/<shard>.json` tells what the shard is (name, size, time stamp, SHA-256, samples, problems) and names the `.npy`
that holds the table of offsets, CRC32s and keys. The table's name carries its digest and the JSON is written last, by
rename: whoever reads sees a whole index or none. Each shard has its own, so any selection composes without a scan.
The JSON is sealed (data/kept.py): one of another user in another folder, or one that was changed, is no index.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any, BinaryIO

import numpy as np

from data.errors import DataError
from data.kept import believed, folders, keep
from data.parents import end_with_parent
from data.scan import MAX_BYTES, Problem, Sample, Scan, scan_tar
from data.scan_rows import Rows, RowScan, scan_array, scan_lines, scan_table
from data.storage import Stat, open_stream, shard_name, stat

FORMAT = 1
LARGEST = max(MAX_BYTES.values())
STATS_AT_ONCE = 16  # a remote one takes a round trip
BYTES_PER_PROCESS = 64 << 20  # below this a scan is over before a process has started
SCANS: dict[str, Callable[[BinaryIO], Scan | RowScan]] = {
    ".tar": scan_tar,
    ".jsonl": scan_lines,
    ".json": scan_array,
    ".tsv": scan_table,
}

# One row per sample and a last one that only closes the ranges: `member` and `key` are where its members and key begin.
ROW = np.dtype([("crc32", "<u4"), ("member", "<u4"), ("key", "<u4")])
MEMBER = np.dtype([("offset", "<i8"), ("size", "<u4"), ("suffix", "<u2")])


@dataclass(frozen=True)
class Table:
    """Where every sample of a shard lies: rows (samples + 1,) of ROW, members of MEMBER, keys as one run of UTF-8.

    Nothing is checked before it is used, so that a shard opens at once; somebody else may have made the index.
    """

    index: ShardIndex
    rows: np.ndarray
    members: np.ndarray
    keys: np.ndarray

    def crc32(self, row: int) -> int:
        return int(self.rows[row]["crc32"])

    def places(self, row: int) -> list[tuple[int, int, int]]:
        """(offset, size, number of the suffix) of each member, in file order. DataError when they cannot be."""
        found = self.members[int(self.rows[row]["member"]) : int(self.rows[row + 1]["member"])].tolist()
        ends, suffixes = self.index.size, len(self.index.suffixes)
        if not found or not all(0 <= o <= ends - size and size <= LARGEST and n < suffixes for o, size, n in found):
            raise self.index.damaged(f"row {row} leads nowhere")
        return found

    def key(self, row: int) -> str:
        found = self.keys[int(self.rows[row]["key"]) : int(self.rows[row + 1]["key"])]
        return found.tobytes().decode("utf-8", "replace")


@dataclass(frozen=True)
class ShardIndex:
    """What we know of a shard. `mtime`: time stamp in ns, or the entity tag of a remote one; `table_file`: a path."""

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

    def table(self) -> Table:
        """The offsets, mapped into memory; DataError when the index was damaged or taken away."""
        try:
            raw = np.asarray(np.load(self.table_file, mmap_mode="r", allow_pickle=False))
            end = (self.samples + 1) * ROW.itemsize
            rows, members, keys = np.split(raw, [end, end + self.members * MEMBER.itemsize])
            return Table(self, rows.view(ROW), members.view(MEMBER), keys)
        except (OSError, ValueError) as error:
            raise self.damaged(error) from error

    def damaged(self, how: object) -> DataError:
        return DataError(f"{self.table_file}: the index of {self.path} is damaged ({how}); delete it.")


def index_shard(path: str) -> ShardIndex:
    """The index of one shard: the stored one when size and time stamp still fit, else a new scan, stored.

    Raises ConfigError when there is no such shard; what is wrong inside is in `.problems`.
    """
    found = stat(path)
    return _load(path, found) or _scan(path, found)


def stored_index(path: str) -> ShardIndex | None:
    """The index of one shard when there is one that still fits; nothing is scanned. Raises as `data.storage.stat`."""
    return _load(path, stat(path))


def has_index(path: str) -> bool:
    """Whether the shard was ever indexed, in whatever state it was."""
    return any((folder / f"{shard_name(path)}.json").is_file() for folder in folders(path))


def index_shards(paths: Sequence[str], workers: int | None = None) -> Iterator[ShardIndex]:
    """Indexes in the order of `paths`; those that need a scan are spread over `workers` processes (None: all cores)."""
    with ThreadPoolExecutor(STATS_AT_ONCE) as threads:
        stats = dict(zip(paths, threads.map(stat, paths), strict=True))
    stored = {path: index for path in paths if (index := _load(path, stats[path]))}
    stale = [path for path in paths if path not in stored]
    useful = sum(stats[path].size for path in stale) // BYTES_PER_PROCESS
    processes = min(workers if workers is not None else available_cores(), len(stale), useful)
    if processes < 2:
        yield from (stored.get(path) or _scan(path, stats[path]) for path in paths)
        return
    # spawn: the caller may hold threads (torch, fsspec) that must not be forked
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        scanned = pool.map(index_shard, stale)
        yield from (stored.get(path) or next(scanned) for path in paths)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint(indexes: Iterable[ShardIndex]) -> str:
    """SHA-256 of names, sizes, contents and sample counts in order: the same wherever the shards lie."""
    known = [[index.name, index.size, index.sha256, index.samples] for index in indexes]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


# ---- scanning ------------------------------------------------------------------------------------------------------


class _Hashing(io.RawIOBase):
    """A stream that keeps the SHA-256 of all that was read through it."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw, self.sha256 = raw, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count = self.raw.readinto(buffer)  # type: ignore[attr-defined]
        self.sha256.update(memoryview(buffer)[:count])
        return count


def sha256_of(path: str) -> str:
    with open_stream(path) as raw:
        return _drain(_Hashing(raw))


def _drain(hashing: _Hashing) -> str:
    buffer = bytearray(1 << 20)
    while hashing.readinto(buffer):
        pass
    return hashing.sha256.hexdigest()


def _scan(path: str, found: Stat) -> ShardIndex:
    with open_stream(path) as raw:
        hashing = _Hashing(raw)
        scan = SCANS.get(os.path.splitext(shard_name(path))[1], scan_tar)(io.BufferedReader(hashing, 1 << 20))
        sha256 = _drain(hashing)
    return _store(path, found, scan, sha256)


@dataclass(frozen=True)
class _Columns:
    """What a table is made of: CRC32, number of members and bytes of the key of each sample; their members and keys."""

    crc32: np.ndarray
    counts: np.ndarray
    key_sizes: np.ndarray
    members: np.ndarray
    keys: bytes
    suffixes: tuple[str, ...]

    def packed(self) -> np.ndarray:
        """The table as one array of bytes."""
        rows = np.zeros(len(self.crc32) + 1, ROW)
        rows["crc32"][:-1] = self.crc32
        rows["member"][1:], rows["key"][1:] = np.cumsum(self.counts), np.cumsum(self.key_sizes)
        return np.frombuffer(b"".join((rows.data, self.members.data, self.keys)), np.uint8)


def _of_samples(samples: list[Sample]) -> _Columns:
    suffixes = tuple(sorted({suffix for sample in samples for suffix, _, _ in sample.members}))
    number = {suffix: i for i, suffix in enumerate(suffixes)}
    keys = [sample.key.encode("utf-8") for sample in samples]
    return _Columns(
        crc32=np.array([sample.crc32 for sample in samples], np.uint32),
        counts=np.array([len(sample.members) for sample in samples], np.uint32),
        key_sizes=np.array([len(key) for key in keys], np.uint32),
        members=np.array([(at, size, number[s]) for sample in samples for s, at, size in sample.members], MEMBER),
        keys=b"".join(keys),
        suffixes=suffixes,
    )


def _of_rows(rows: Rows) -> _Columns:
    """No object for any row: there may be tens of millions."""
    members = np.zeros(len(rows), MEMBER)
    members["offset"], members["size"] = rows.offset, rows.size
    keys = np.asarray(rows.key).astype("S12")
    sizes = np.strings.str_len(keys)
    return _Columns(
        crc32=np.asarray(rows.crc32),
        counts=np.ones(len(rows), np.uint32),
        key_sizes=sizes,
        members=members,
        keys=keys.tobytes().replace(b"\0", b""),
        suffixes=(rows.suffix,),
    )


# ---- storing -------------------------------------------------------------------------------------------------------


def _load(path: str, found: Stat) -> ShardIndex | None:
    for array, facts in believed(path, shard_name(path)):
        if facts.pop("format", None) == FORMAT and (facts["size"], facts["mtime"]) == found:
            facts["suffixes"] = tuple(facts["suffixes"])
            facts["problems"] = tuple(Problem(**problem) for problem in facts["problems"])
            del facts["table_sha256"]
            return ShardIndex(path=path, **{**facts, "table_file": str(array)})
    return None


def _store(path: str, found: Stat, scan: Scan | RowScan, sha256: str) -> ShardIndex:
    columns = _of_rows(scan.rows) if isinstance(scan, RowScan) else _of_samples(scan.samples)
    index = ShardIndex(
        path=path,
        name=shard_name(path),
        size=found.size,
        mtime=found.mtime,
        sha256=sha256,
        samples=len(columns.crc32),
        members=len(columns.members),
        suffixes=columns.suffixes,
        ignored={} if isinstance(scan, RowScan) else dict(sorted(scan.ignored.items())),
        problem_count=scan.problems.count,
        problems=tuple(scan.problems.first),
        table_file="",
    )
    facts = {"format": FORMAT, **asdict(index)}
    del facts["path"], facts["table_file"]
    return replace(index, table_file=str(keep(path, index.name, facts, columns.packed())))
