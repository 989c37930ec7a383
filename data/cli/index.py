"""What the verbs of `python -m data` print about shards and bad data, and the verb `index`."""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from dyad.data.base.errors import ConfigError, DataError, printable
from dyad.data.base.secrets import without_secrets
from dyad.data.cli.options import IndexOptions
from dyad.data.shards.index import FORMAT, ShardIndex, fingerprint, index_shards
from dyad.data.shards.sources import ShardSource

T = TypeVar("T")

MAX_ROWS = 40  # with more shards the table has only the broken ones
SHOWN = 20  # bad lines that are printed
IN_MANIFEST = ("path", "name", "size", "mtime", "sha256", "samples", "problem_count")  # of each shard


def list_shards(sources: Sequence[ShardSource], options: IndexOptions) -> None:
    """Index all shards, print a table of them, write the manifest. Raises DataError when a shard is broken."""
    paths = [shard for source in sources for shard in source.shards]
    indexes = list(with_progress(index_shards(paths, options.workers), len(paths), "indexing"))
    listed = indexes if len(indexes) <= MAX_ROWS else [index for index in indexes if index.problems]
    print(printable("\n".join([*_table(listed), *_total(indexes)])))
    if options.out:
        _write_manifest(Path(options.out), sources, indexes)
    report_problems(indexes)


def report_problems(indexes: Sequence[ShardIndex]) -> None:
    """Print the problems of all shards. Raises DataError with their number when there are any."""
    broken = [index for index in indexes if index.problems]
    for index in broken:
        for problem in index.problems:
            print(printable(f"{index.path}: {problem}"))
        if index.problem_count > len(index.problems):
            print(printable(f"{index.path}: … and {index.problem_count - len(index.problems)} more"))
    if broken:
        count = sum(index.problem_count for index in broken)
        raise DataError(f"{len(broken)} of {len(indexes)} shards are broken, {count} problems. Training refuses them.")


def with_progress(items: Iterable[T], total: int, what: str) -> Iterable[T]:
    """The items; on a terminal a progress bar shows how many have come."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, console=Console(stderr=True), transient=True)


@dataclass
class BadLines:
    """Messages about bad data: the first SHOWN of them, and their number, since nearly every row may be bad."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.lines.append(line)

    def __iadd__(self, other: BadLines) -> BadLines:
        self.lines += other.lines[: SHOWN - len(self.lines)]
        self.count += other.count
        return self

    def __str__(self) -> str:
        more = [f"… and {self.count - SHOWN:,} more"] if self.count > SHOWN else []
        return "\n".join([*(f"bad: {line}" for line in self.lines), *more])


def count_repeated(keys: array[int]) -> int:
    """The number of keys that equal an earlier one."""
    return len(keys) - len(np.unique(np.array(keys, np.int64)))


def _table(indexes: Sequence[ShardIndex]) -> list[str]:
    if not indexes:
        return []
    width = max(len(index.path) for index in indexes)
    rows = [
        f"{index.path:{width}} {index.samples:>10,} {index.size / 1e6:>10,.1f} {index.problem_count:>9,}"
        for index in indexes
    ]
    return [f"{'shard':{width}} {'samples':>10} {'MB':>10} {'problems':>9}", *rows]


def _total(indexes: Sequence[ShardIndex]) -> list[str]:
    ignored = sum((Counter(index.ignored) for index in indexes), Counter[str]())
    samples, size, problems = (sum(getattr(i, key) for i in indexes) for key in ("samples", "size", "problem_count"))
    counts = ", ".join(f"{n:,} {kind or 'without suffix'}" for kind, n in ignored.most_common())
    return [
        f"{len(indexes)} shards, {samples:,} samples, {size / 1e6:,.1f} MB, {problems:,} problems",
        f"fingerprint {fingerprint(indexes)}",
        *([f"ignored members: {counts}"] if ignored else []),
    ]


def _write_manifest(path: Path, sources: Sequence[ShardSource], indexes: Sequence[ShardIndex]) -> None:
    rest, first_id, described = iter(indexes), 0, []
    for source in sources:
        shards = []
        for index in islice(rest, len(source.shards)):
            shards.append({"first_id": first_id, **{key: getattr(index, key) for key in IN_MANIFEST}})
            first_id += index.samples
        described.append({"weight": source.weight, "shards": shards})
    manifest = {"format": FORMAT, "fingerprint": fingerprint(indexes), "samples": first_id, "sources": described}
    try:
        path.write_text(json.dumps(without_secrets(manifest), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}.") from error
    print(f"manifest written to {path}")
