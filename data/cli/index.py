"""`python -m data index`: prints a table of files and their problems, and with out=FILE writes a manifest.

A manifest is a JSON file that lists the files."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path

from dyad.data.base.errors import ConfigError, DataError
from dyad.data.base.progress import print_line, tracked
from dyad.data.base.secrets import without_secrets
from dyad.data.cli.inputs import shards_of
from dyad.data.cli.options import IndexOptions
from dyad.data.shards.index import FORMAT, ShardIndex, fingerprint, index_shards
from dyad.data.shards.rows import SUFFIXES
from dyad.data.shards.shards import how_to_mend
from dyad.data.shards.sources import SHARDS, ShardSource

MAX_ROWS = 40  # if there are more shards, the table lists only broken ones
IN_MANIFEST = ("path", "name", "size", "mtime", "sha256", "samples", "problem_count")  # written for each shard


def run(arguments: Sequence[str], options: IndexOptions) -> None:
    """Index all files that the arguments name, print a table of them and their problems, and write the manifest.

    Of a file with more than MAX_PROBLEMS (100) problems the first are printed, and a count. The manifest is written
    only if `options.out` is set, over an older file, also when files are broken. Of more than MAX_ROWS files, the table
    has only the broken ones. Raises ConfigError if `options.out` is one of the files or cannot be written, DataError at
    the end when a file is broken; and as `shards_of` and `index_shards` do.
    """
    # a folder of shards may have a manifest.json: .json and .tsv files count only where they are named
    rows = any(argument.endswith((".json", ".tsv")) for argument in arguments)
    sources = shards_of(arguments, options, "SOURCE", SUFFIXES if rows else SHARDS)
    out = options.out and Path(options.out).expanduser()
    if out and os.path.realpath(out) in (os.path.realpath(shard) for source in sources for shard in source.shards):
        raise ConfigError(f"out={out} is one of the shards, and would be lost. Give a new file, such as manifest.json")
    indexes = index_sources(sources, options.workers)
    listed = indexes if len(indexes) <= MAX_ROWS else [index for index in indexes if index.problems]
    width = max((len(index.path) for index in listed), default=0)
    if listed:
        print_line(f"{'shard':{width}} {'samples':>10} {'MB':>10} {'problems':>9}")
    for index in listed:
        print_line(f"{index.path:{width}} {index.samples:>10,} {index.size / 1e6:>10,.1f} {index.problem_count:>9,}")
    samples, size, problems = (sum(getattr(i, key) for i in indexes) for key in ("samples", "size", "problem_count"))
    print_line(f"{len(indexes)} shards, {samples:,} samples, {size / 1e6:,.1f} MB, {problems:,} problems")
    print_line(f"fingerprint {fingerprint(indexes)}")
    if ignored := sum((Counter(index.ignored) for index in indexes), Counter[str]()):
        counts = ", ".join(f"{count:,} {suffix or 'without suffix'}" for suffix, count in ignored.most_common())
        print_line(f"ignored members: {counts}")
    if out:
        _write_manifest(out, sources, indexes)
    report_problems(indexes)


def index_sources(sources: Sequence[ShardSource], workers: int | None) -> list[ShardIndex]:
    """Index all shards of the sources and return one index per shard, in order. Shows its progress.

    The problems of a shard are not raised; its index has the first of them and their number. workers: the most
    processes; None: one per CPU core. Errors as of `index_shards`.
    """
    paths = [shard for source in sources for shard in source.shards]
    return list(tracked(index_shards(paths, workers), "indexing", len(paths)))


def report_problems(indexes: Sequence[ShardIndex]) -> None:
    """Print the problems that the indexes of shards list, and raise DataError with their number if there are any."""
    broken = [index for index in indexes if index.problems]
    for index in broken:
        for problem in index.problems:
            print_line(f"{index.path}: {problem}")
        if index.problem_count > len(index.problems):
            print_line(f"{index.path}: … and {index.problem_count - len(index.problems)} more")
    if broken:
        count = sum(index.problem_count for index in broken)
        counts = f"{len(broken)} of {len(indexes)} shards are broken, {count} problems"
        raise DataError(f"{counts}. Training refuses them.{how_to_mend(broken)}")


def _write_manifest(path: Path, sources: Sequence[ShardSource], indexes: Sequence[ShardIndex]) -> None:
    """Write the manifest: JSON with weight and shards of each source, and for each shard IN_MANIFEST and its first id.

    Credentials in paths are redacted. Raises ConfigError if the file cannot be written.
    """
    *first_ids, samples = accumulate((index.samples for index in indexes), initial=0)
    facts = ({key: getattr(index, key) for key in IN_MANIFEST} for index in indexes)
    shards = ({"first_id": first_id, **each} for first_id, each in zip(first_ids, facts, strict=True))
    described = [{"weight": each.weight, "shards": list(islice(shards, len(each.shards)))} for each in sources]
    manifest = {"format": FORMAT, "fingerprint": fingerprint(indexes), "samples": samples, "sources": described}
    try:
        path.write_text(json.dumps(without_secrets(manifest), indent=1) + "\n")  # may be a link or /dev/stdout
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}.") from error
    print(f"manifest written to {path}")
