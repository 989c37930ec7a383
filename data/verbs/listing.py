"""`python -m data index`: a table of shards, their problems, and the manifest as one file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from data.errors import ConfigError, DataError, printable
from data.index import FORMAT, ShardIndex, fingerprint, index_shards
from data.secrets import without_secrets
from data.sources import ShardSource
from data.verbs.options import IndexOptions

T = TypeVar("T")

MAX_ROWS = 40  # with more shards only broken ones get a row


def list_shards(sources: Sequence[ShardSource], options: IndexOptions) -> None:
    """Index everything, print what there is; raises DataError when anything is broken."""
    paths = [shard for source in sources for shard in source.shards]
    indexes = list(with_progress(index_shards(paths, options.workers), len(paths), "indexing"))
    listed = indexes if len(indexes) <= MAX_ROWS else [index for index in indexes if index.problems]
    print(printable("\n".join([*_table(listed), _total(indexes)])))
    if options.out:
        _write_manifest(Path(options.out), sources, indexes)
    report_problems(indexes)


def report_problems(indexes: Sequence[ShardIndex]) -> None:
    """Print every problem; raises DataError with their number when there are any."""
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
    """The items, with a bar while they come when a person watches."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total=total, console=Console(stderr=True), transient=True)


def _table(indexes: Sequence[ShardIndex]) -> list[str]:
    if not indexes:
        return []
    width = max(len(index.path) for index in indexes)
    rows = [
        f"{index.path:{width}} {index.samples:>10,} {index.size / 1e6:>10,.1f} {index.problem_count:>9,}"
        for index in indexes
    ]
    return [f"{'shard':{width}} {'samples':>10} {'MB':>10} {'problems':>9}", *rows]


def _total(indexes: Sequence[ShardIndex]) -> str:
    ignored = Counter[str]()
    for index in indexes:
        ignored.update(index.ignored)
    samples, size, problems = (sum(getattr(i, key) for i in indexes) for key in ("samples", "size", "problem_count"))
    lines = [
        f"{len(indexes)} shards, {samples:,} samples, {size / 1e6:,.1f} MB, {problems:,} problems",
        f"fingerprint {fingerprint(indexes)}",
    ]
    if ignored:
        lines.append(
            "ignored members: " + ", ".join(f"{n:,} {kind or 'without suffix'}" for kind, n in ignored.most_common())
        )
    return "\n".join(lines)


def _write_manifest(path: Path, sources: Sequence[ShardSource], indexes: Sequence[ShardIndex]) -> None:
    rest = iter(indexes)
    first_id, described = 0, []
    for source in sources:
        shards = []
        for _ in source.shards:
            index = next(rest)
            shards.append(
                {"first_id": first_id}
                | {
                    key: getattr(index, key)
                    for key in ("path", "name", "size", "mtime", "sha256", "samples", "problem_count")
                }
            )
            first_id += index.samples
        described.append({"weight": source.weight, "shards": shards})
    manifest = {"format": FORMAT, "fingerprint": fingerprint(indexes), "samples": first_id, "sources": described}
    try:
        path.write_text(json.dumps(without_secrets(manifest), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}.") from error
    print(f"manifest written to {path}")
