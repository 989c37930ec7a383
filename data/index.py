"""The index of a shard: made by one scan, kept beside the shard, read without unpickling anything.

`.index/<shard>.json` tells what the shard is (name, size, time stamp, SHA-256, samples, problems) and names the `.npy`
that holds the table of offsets, CRC32s and keys. The table's name carries its digest and the JSON is written last, by
rename: whoever reads sees a whole index or none. Each shard has its own, so any selection composes without a scan.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.errors import DataError
from data.scan import Problem, Sample, Scan, scan_lines, scan_tar
from data.storage import Stat, open_stream, scheme_of, shard_name, stat

FORMAT = 1
MAX_PROBLEMS = 100  # listed per shard; all are counted
STATS_AT_ONCE = 16  # a remote one takes a round trip
BYTES_PER_PROCESS = 64 << 20  # below this a scan is over before a process has started

# One row per sample and a last one that only closes the ranges: `member` and `key` are where its members and key begin.
ROW = np.dtype([("crc32", "<u4"), ("member", "<u4"), ("key", "<u4")])
MEMBER = np.dtype([("offset", "<i8"), ("size", "<u4"), ("suffix", "<u2")])


@dataclass(frozen=True)
class Table:
    """Where every sample of a shard lies: rows (samples + 1,) of ROW, members of MEMBER, keys as one run of UTF-8."""

    rows: np.ndarray
    members: np.ndarray
    keys: np.ndarray

    def crc32(self, row: int) -> int:
        return int(self.rows[row]["crc32"])

    def places(self, row: int) -> list[tuple[int, int, int]]:
        """(offset, size, number of the suffix) of each member, in file order."""
        return self.members[int(self.rows[row]["member"]) : int(self.rows[row + 1]["member"])].tolist()

    def key(self, row: int) -> str:
        return self.keys[int(self.rows[row]["key"]) : int(self.rows[row + 1]["key"])].tobytes().decode("utf-8")


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
            return Table(rows.view(ROW), members.view(MEMBER), keys)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.table_file}: the index of {self.path} is damaged ({error}); delete it.") from error


def index_shard(path: str) -> ShardIndex:
    """The index of one shard: the stored one when size and time stamp still fit, else a new scan, stored.

    Raises ConfigError when there is no such shard; what is wrong inside is in `.problems`.
    """
    found = stat(path)
    return _load(path, found) or _scan(path, found)


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
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
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
        scan = (scan_lines if shard_name(path).endswith(".jsonl") else scan_tar)(io.BufferedReader(hashing, 1 << 20))
        sha256 = _drain(hashing)
    return _store(path, found, scan, sha256)


def _packed(samples: list[Sample]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The table as one array of bytes, and the suffixes its numbers stand for."""
    suffixes = tuple(sorted({suffix for sample in samples for suffix, _, _ in sample.members}))
    number = {suffix: i for i, suffix in enumerate(suffixes)}
    keys = [sample.key.encode("utf-8") for sample in samples]
    rows = np.zeros(len(samples) + 1, ROW)
    rows["crc32"][:-1] = [sample.crc32 for sample in samples]
    rows["member"][1:] = np.cumsum([len(sample.members) for sample in samples])
    rows["key"][1:] = np.cumsum([len(key) for key in keys])
    places = [(offset, size, number[suffix]) for sample in samples for suffix, offset, size in sample.members]
    parts = (rows.tobytes(), np.array(places, MEMBER).tobytes(), *keys)
    return np.frombuffer(b"".join(parts), np.uint8), suffixes


# ---- storing -------------------------------------------------------------------------------------------------------


def _folders(path: str) -> list[Path]:
    """Where the index may be: beside the shard, or in the user's cache when that cannot be written."""
    remote = scheme_of(path)
    parent = path.rpartition("/")[0] if remote else os.path.dirname(os.path.realpath(path))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    cached = cache / "dyad" / "index" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    return [cached] if remote else [Path(parent) / ".index", cached]


def _load(path: str, found: Stat) -> ShardIndex | None:
    for folder in _folders(path):
        try:
            index = _from_json(path, folder, json.loads((folder / f"{shard_name(path)}.json").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # none there, or another format: scan again
        if (index.size, index.mtime) == found and os.path.exists(index.table_file):
            return index
    return None


def _from_json(path: str, folder: Path, stored: dict[str, Any]) -> ShardIndex:
    if stored.pop("format") != FORMAT:
        raise ValueError("another format")
    stored["suffixes"] = tuple(stored["suffixes"])
    stored["problems"] = tuple(Problem(**problem) for problem in stored["problems"])
    stored["table_file"] = str(folder / Path(stored["table_file"]).name)
    return ShardIndex(path=path, **stored)


def _store(path: str, found: Stat, scan: Scan, sha256: str) -> ShardIndex:
    table, suffixes = _packed(scan.samples)
    written = io.BytesIO()
    np.save(written, table, allow_pickle=False)
    digest = hashlib.sha256(written.getvalue()).hexdigest()[:16]
    index = ShardIndex(
        path=path,
        name=shard_name(path),
        size=found.size,
        mtime=found.mtime,
        sha256=sha256,
        samples=len(scan.samples),
        members=sum(len(sample.members) for sample in scan.samples),
        suffixes=suffixes,
        ignored=dict(sorted(scan.ignored.items())),
        problem_count=len(scan.problems),
        problems=tuple(scan.problems[:MAX_PROBLEMS]),
        table_file=f"{shard_name(path)}.{digest}.npy",
    )
    described = {"format": FORMAT, **asdict(index)}
    del described["path"]
    folder = _write(_folders(path), index, written.getvalue(), json.dumps(described, indent=1).encode())
    return _from_json(path, folder, json.loads(json.dumps(described)))


def _write(folders: list[Path], index: ShardIndex, table: bytes, described: bytes) -> Path:
    """Write table, then JSON, into the first folder that takes them; drop tables of earlier states of the shard."""
    failures = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / index.table_file, table)
            _replace(folder / f"{index.name}.json", described)
            _forget_others(folder, index)
            return folder
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
    raise DataError(f"the index of {index.path} cannot be written ({'; '.join(failures)}). Set XDG_CACHE_HOME.")


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _forget_others(folder: Path, index: ShardIndex) -> None:
    for table in folder.glob(f"{glob.escape(index.name)}.{'[0-9a-f]' * 16}.npy"):
        if table.name != index.table_file:
            table.unlink(missing_ok=True)
