"""`python -m data check` for shards of pictures: compares bytes with the index, decodes every picture, counts."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
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
from data.verbs.listing import BadLines, count_repeated, report_problems, with_progress
from data.verbs.options import CheckOptions

if TYPE_CHECKING:
    from data.sample import ShardSample

BLOCK = 512  # samples per task
TASKS_PER_PROCESS = 16  # a process that gets fewer spends more time on its imports
NUMBERS = partial(array, "q")


@dataclass
class PictureFindings:
    """What some samples hold. Findings of parts add up with `+=`.

    widths, heights: pixels. words: number of words in each caption. pictures, texts: 64-bit digests.
    """

    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: array[int] = field(default_factory=NUMBERS)
    heights: array[int] = field(default_factory=NUMBERS)
    words: array[int] = field(default_factory=NUMBERS)
    pictures: array[int] = field(default_factory=NUMBERS)
    texts: array[int] = field(default_factory=NUMBERS)
    bad: BadLines = field(default_factory=BadLines)

    def __iadd__(self, other: PictureFindings) -> PictureFindings:
        for part in fields(self):
            setattr(self, part.name, iadd(getattr(self, part.name), getattr(other, part.name)))
        return self


Task = tuple[ShardIndex, range, CheckOptions]


def check_shards(values: Sequence[str], options: CheckOptions) -> None:
    """Check all shards and print a summary. Raises DataError at the end when anything is damaged.

    The samples of a shard whose structure is broken are not read; its problems are listed.
    """
    paths = [shard for source in parse_sources(values, "SOURCE") for shard in source.shards]
    indexes = list(with_progress(index_shards(paths, options.workers), len(paths), "indexing"))
    sound = [index for index in indexes if not index.problems]
    tasks = [
        (index, range(index.samples)[start : start + BLOCK], options)
        for index in sound
        for start in range(0, index.samples, BLOCK)
    ]
    found = PictureFindings()
    with _spread(options.workers, len(tasks)) as spread:
        for index, digest in zip(sound, spread(sha256_of, [index.path for index in sound]), strict=True):
            if digest != index.sha256:
                found.bad.add(f"{index.path}: its SHA-256 is not as indexed")
        for part in with_progress(spread(examine, tasks), len(tasks), "decoding"):
            found += part
    print(printable("\n".join(_summary(found, sound))))
    report_problems(indexes)
    if not found.samples:
        raise DataError("there is no sample.")
    if found.bad.count:
        raise DataError(f"{found.bad.count:,} findings of damage in {found.samples:,} samples.")


@contextmanager
def _spread(
    workers: int | None, tasks: int
) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]]:
    """A `map` that runs in several processes, or in this one when there are few tasks. workers: None: one per core."""
    processes = min(workers if workers is not None else available_cores(), tasks // TASKS_PER_PROCESS)
    if processes < 2:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        yield pool.map


def examine(task: Task) -> PictureFindings:
    """Read and decode some samples of one shard."""
    from data.sample import ShardSample

    index, rows, options = task
    shards, found = Shards([ShardSource((index.path,))], [index]), PictureFindings()
    for row in rows:
        found.samples += 1
        try:
            sample = ShardSample.read(shards, row)
            sample.decoded(options.image_key, options.max_image_pixels)
            encoded = sample.picture(options.image_key)
            header = read_header(encoded, options.max_image_pixels)
            found.formats[header.suffix] += 1
            found.modes[header.mode] += 1
            found.widths.append(header.width)
            found.heights.append(header.height)
            found.pictures.append(_digest(encoded))
            for text in _captions(sample, options.captions.split(",")):
                found.words.append(len(text.split()))
                found.texts.append(_digest(text.encode()))
        except DataError as error:
            found.bad.add(str(error))
    return found


def _captions(sample: ShardSample, names: Sequence[str]) -> Sequence[str]:
    """The captions in the first of `names` that the sample has; none for the class number `cls`, which is checked.

    Raises SampleError as training does.
    """
    held = {*sample.members, *sample.fields} - {"json"}
    name = next((name for name in names if name in held), None)
    if name is None:
        has = ", ".join(sorted(held))
        raise SampleError(f"{sample.where} has no caption: captions={','.join(names)}, it has {has:.200}.")
    if name == "cls":
        sample.label(name)
        return ()
    return sample.captions(name)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


# ---- what is printed -----------------------------------------------------------------------------------------------


def _summary(found: PictureFindings, sound: Sequence[ShardIndex]) -> list[str]:
    repeated = f"{count_repeated(found.pictures):,} pictures, {count_repeated(found.texts):,} texts"
    return [
        f"samples     {found.samples:,} in {len(sound)} shards, {sum(index.size for index in sound) / 1e6:,.1f} MB",
        f"pictures    {_counts(found.formats)}; modes {_counts(found.modes)}",
        f"width       {_range(found.widths)}",
        f"height      {_range(found.heights)}",
        f"captions    {len(found.words):,}; words {_range(found.words)}",
        f"duplicates  {repeated}",
        f"damage      {found.bad.count:,}",
        *([str(found.bad)] if found.bad.count else []),
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"


def _range(values: array[int]) -> str:
    return f"min {min(values)}, median {np.median(values):g}, max {max(values)}" if values else "none"
