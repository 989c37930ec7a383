"""`python -m data check`: is every byte as indexed, does every picture decode, and what is in there?"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from multiprocessing import get_context
from operator import iadd
from typing import TYPE_CHECKING, Any

import numpy as np

from data.errors import DataError, SampleError, printable
from data.index import ShardIndex, available_cores, index_shards
from data.parents import end_with_parent
from data.pictures import read_header
from data.shards import Shards
from data.sources import ShardSource, parse_sources
from data.storage import sha256_of
from data.verbs.listing import report_problems, with_progress
from data.verbs.options import CheckOptions

if TYPE_CHECKING:
    from data.sample import Sample

BLOCK = 512  # samples per task
TASKS_PER_PROCESS = 16  # fewer are done before a process has imported what it needs
SHOWN = 20


@dataclass
class Findings:
    """What some samples hold; findings of parts add up. Sizes in pixels, words per caption, digests of 8 bytes."""

    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: array[int] = field(default_factory=lambda: array("l"))
    heights: array[int] = field(default_factory=lambda: array("l"))
    words: array[int] = field(default_factory=lambda: array("l"))
    pictures: array[int] = field(default_factory=lambda: array("q"))
    texts: array[int] = field(default_factory=lambda: array("q"))
    bad: list[str] = field(default_factory=list)

    def __iadd__(self, other: Findings) -> Findings:
        for part in fields(self):
            setattr(self, part.name, iadd(getattr(self, part.name), getattr(other, part.name)))
        return self


Task = tuple[ShardIndex, range, CheckOptions]


def check_shards(values: Sequence[str], options: CheckOptions) -> None:
    """Check everything and print a summary; raises DataError at the end when anything is damaged.

    Shards whose structure is broken are listed and not looked into.
    """
    paths = [shard for source in parse_sources(values, "SOURCE") for shard in source.shards]
    indexes = list(with_progress(index_shards(paths, options.workers), len(paths), "indexing"))
    sound = [index for index in indexes if not index.problems]
    tasks = [task for index in sound for task in _tasks(index, options)]
    found = Findings()
    with _spread(options.workers, len(tasks)) as spread:
        for index, digest in zip(sound, spread(sha256_of, [index.path for index in sound]), strict=True):
            found.bad += [] if digest == index.sha256 else [f"{index.path}: its SHA-256 is not as indexed"]
        for part in with_progress(spread(examine, tasks), len(tasks), "decoding"):
            found += part
    print(printable("\n".join([*_summary(found, sound), *_listed(found.bad)])))
    report_problems(indexes)
    if not found.samples:
        raise DataError("there is no sample.")
    if found.bad:
        raise DataError(f"{len(found.bad):,} findings of damage in {found.samples:,} samples.")


def _tasks(index: ShardIndex, options: CheckOptions) -> list[Task]:
    rows = range(index.samples)
    return [(index, rows[start : start + BLOCK], options) for start in rows[::BLOCK]]


@contextmanager
def _spread(
    workers: int | None, tasks: int
) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]]:
    """A map over processes, or in this one when there is little to do."""
    processes = min(workers if workers is not None else available_cores(), tasks // TASKS_PER_PROCESS)
    if processes < 2:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        yield pool.map


def examine(task: Task) -> Findings:
    """Read and decode some samples of one shard."""
    from data.sample import Sample

    index, rows, options = task
    shards, found = Shards([ShardSource((index.path,))], [index]), Findings()
    for row in rows:
        found.samples += 1
        try:
            sample = Sample.read(shards, row)
            _examine_picture(found, sample, options)
            _examine_captions(found, sample, options.captions.split(","))
        except DataError as error:
            found.bad.append(str(error))
    return found


def _examine_picture(found: Findings, sample: Sample, options: CheckOptions) -> None:
    sample.decoded(options.image_key, options.max_image_pixels)
    encoded = sample.picture(options.image_key)
    header = read_header(encoded, options.max_image_pixels)
    found.formats[header.suffix] += 1
    found.modes[header.mode] += 1
    found.widths.append(header.width)
    found.heights.append(header.height)
    found.pictures.append(_digest(encoded))


def _examine_captions(found: Findings, sample: Sample, places: Sequence[str]) -> None:
    """The captions at the first of `places` that the sample has, or its class. Raises SampleError as training does."""
    held = {*sample.members, *sample.fields} - {"json"}
    place = next((place for place in places if place in held), None)
    if place is None:
        has = ", ".join(sorted(held))
        raise SampleError(f"{sample.where} has no caption: captions={','.join(places)}, it has {has:.200}.")
    if place == "cls":
        sample.label(place)
        return
    for text in sample.captions(place):
        found.words.append(len(text.split()))
        found.texts.append(_digest(text.encode()))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


# ---- what is printed -----------------------------------------------------------------------------------------------


def _summary(found: Findings, sound: Sequence[ShardIndex]) -> list[str]:
    return [
        f"samples     {found.samples:,} in {len(sound)} shards, {sum(index.size for index in sound) / 1e6:,.1f} MB",
        f"pictures    {_counts(found.formats)}; modes {_counts(found.modes)}",
        f"width       {_range(found.widths)}",
        f"height      {_range(found.heights)}",
        f"captions    {len(found.words):,}; words {_range(found.words)}",
        f"duplicates  {_repeated(found.pictures):,} pictures, {_repeated(found.texts):,} texts",
        f"damage      {len(found.bad):,}",
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


def _range(values: array[int]) -> str:
    return f"min {min(values)}, median {np.median(values):g}, max {max(values)}" if values else "none"


def _repeated(digests: array[int]) -> int:
    """How many have an equal one before them."""
    return len(digests) - len(np.unique(np.array(digests, np.int64)))


def _listed(bad: Sequence[str]) -> list[str]:
    return [f"bad: {line}" for line in bad[:SHOWN]] + ([f"… and {len(bad) - SHOWN:,} more"] if len(bad) > SHOWN else [])
