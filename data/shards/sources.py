"""Parse values such as data.train into lists of shards: paths, folders, globs, brace lists, URLs, each with a
weight."""

import glob
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.secrets import HIDDEN
from dyad.data.shards.storage import SCHEMES, list_remote, scheme_of, shard_name

SUFFIXES = (".tar", ".jsonl")
PACKED = (".gz", ".zst", ".tgz")
LISTED_SCHEMES = ("s3", "gs", "hf", "memory")  # http servers cannot be asked what they hold
Tables = Callable[[str], Sequence[str]]  # path → the shards that its table is read from; none for a path of no table
FORMS = "a path, a folder, a glob, 'd/{000..099}.tar', several joined by '::', each with a weight like '@2' or '@0.5'"


@dataclass(frozen=True)
class ShardSource:
    """Shards that share one weight. weight: how often each of their samples appears per epoch."""

    shards: tuple[str, ...]
    weight: float = 1.0


def parse_sources(
    value: str | Sequence[str],
    key: str = "data.train",
    suffixes: Sequence[str] = SUFFIXES,
    tables: Tables = lambda path: (),
) -> list[ShardSource]:
    """Parse a configuration value into sources (lists of shards with a weight).

    value: paths, folders, globs, brace lists or URLs, joined by '::' or given as a list; each may end in a weight such
    as '@2'. Each of these parts becomes one source, in the same order. The shards of a folder or glob are sorted by
    name. key: the configuration key, for messages. tables: gives the shards of a path that is a table. Raises
    ConfigError when a part matches nothing, does not end in one of `suffixes` and is no table, appears twice, has an
    unknown URL scheme or a weight that is not a positive number.
    """
    sources = [
        ShardSource(tuple(_shards(path, key, tuple(suffixes), tables)), weight)
        for path, weight in split_sources(value, key)
    ]
    refuse_twice([shard for source in sources for shard in source.shards], key)
    return sources


def split_sources(value: str | Sequence[str], key: str) -> list[tuple[str, float]]:
    """Split a text, or each text of a list, at each '::'. Return (path or URL as written, weight) of each part; the
    weight is 1 when none is written ('a.tar@2' has weight 2). key: the configuration key, for messages. Raises
    ConfigError for an empty part and for a weight that is not a positive number."""
    texts = [value] if isinstance(value, str) else value
    is_text = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    written = [part.strip() for text in texts for part in text.split("::")] if is_text else []
    if not written or not all(written):
        raise ConfigError(f"{key}={value!r} names no shards. Write {FORMS}, or a list of these.")
    return [_split_weight(part, key) for part in written]


def _split_weight(part: str, key: str) -> tuple[str, float]:
    """Split 'a.tar@2' into ('a.tar', 2.0); the weight is 1 when there is none. key: the configuration key, for
    messages. Raises ConfigError for a weight that is not a positive number."""
    path, at, number = part.rpartition("@")
    try:
        weight = float(number)
    except ValueError:
        return part, 1.0  # an @ inside a name
    if not at:
        return part, 1.0
    if not path or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"{key}: the weight in '{part}' must be a positive number, like '@2' or '@0.5'.")
    return path, weight


def local_path(path: str) -> str:
    """Return the path without a leading `file://`, and with the home folder in place of `~`. Other URLs stay as they
    are."""
    return os.path.expanduser(path.removeprefix("file://"))


def _shards(path: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Iterator[str]:
    path = local_path(path)
    if os.path.exists(path):
        yield from tables(path) or _local(path, key, suffixes, tables)
        return
    from braceexpand import braceexpand

    try:
        expanded = braceexpand(path)
    except ValueError:
        raise ConfigError(f"{key}={path}: a brace is not closed; write lists like 'd/{{000..099}}.tar'.") from None
    for one in expanded:
        if scheme_of(one):
            yield from _remote(one, key, suffixes, tables)
        else:
            yield from _local(one, key, suffixes, tables)


def _local(path: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Sequence[str]:
    if os.path.isdir(path):
        return _of_folder(sorted(str(file) for file in Path(path).iterdir()), path, key, suffixes)
    if os.path.isfile(path):
        return tables(path) or [_shard(path, key, suffixes)]
    files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    # tables only where there are no shards: img2dataset leaves one beside each shard
    shards = [file for file in files if file.endswith(suffixes)] or files
    found = [shard for file in shards for shard in tables(file) or [file] * file.endswith(suffixes)]
    if not found:
        raise ConfigError(f"{key}={path} matches nothing{_missing_part(path)}")
    return found


def _remote(url: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Sequence[str]:
    scheme = scheme_of(url)
    if HIDDEN in url:
        raise ConfigError(f"{key}={url}: the credentials of a URL are never kept. Give it again, whole.")
    if scheme not in SCHEMES:
        raise ConfigError(f"{key}={url}: '{scheme}:' is not read. Use a local path or {', '.join(SCHEMES)}.")
    try:
        if found := tables(url):
            return found
        if scheme not in LISTED_SCHEMES or (shard_name(url).endswith(suffixes) and not glob.has_magic(url)):
            return [_shard(url, key, suffixes)]  # indexing checks that it exists, for many shards at the same time
        return _of_folder(list_remote(url), url, key, suffixes)
    except OSError as error:
        raise ConfigError(f"{key}={url} cannot be listed: {error}") from error


def _of_folder(files: list[str], path: str, key: str, suffixes: tuple[str, ...]) -> list[str]:
    shards = [file for file in files if file.endswith(suffixes) and not shard_name(file).startswith(".")]
    if not shards:
        packed = next((f" {_how_to_unpack(file)}" for file in files if file.endswith(PACKED)), "")
        raise ConfigError(f"{key}={path} matches nothing: there is no {_either(suffixes)} file.{packed}")
    return shards


def _shard(path: str, key: str, suffixes: tuple[str, ...]) -> str:
    if not shard_name(path).endswith(suffixes):
        packed = shard_name(path).endswith(PACKED)
        why = _how_to_unpack(path) if packed else f"shards end in {_either(suffixes)}."
        raise ConfigError(f"{key}={path}: {why}")
    return path


def _either(suffixes: tuple[str, ...]) -> str:
    *others, last = suffixes
    return f"{', '.join(others)} or {last}" if others else last


def _how_to_unpack(path: str) -> str:
    program = "zstd -d" if path.endswith(".zst") else "gunzip -k"
    return f"compressed files cannot be read by offset: unpack it with: {program} {shlex.quote(path)}"


def _missing_part(path: str) -> str:
    """Return the end of an error message, which names the first part of the path that does not exist, for example ": no
    'emojy' in data/samples. Did you mean 'emoji'?"."""
    missing = Path(path)
    while not missing.parent.is_dir():
        missing = missing.parent
    if missing.is_file():
        return f": {missing} is no folder."
    if glob.has_magic(missing.name):
        return f" in {missing.parent}."
    return f": no '{missing.name}' in {missing.parent}.{nearest(missing.name, os.listdir(missing.parent))}"


def refuse_twice(shards: Sequence[str], key: str) -> None:
    """Raise ConfigError when a shard is listed twice, because each of its samples would have two ids. key: the
    configuration key, for the message."""
    for shard, count in Counter(shards).items():
        if count > 1:
            raise ConfigError(f"{key}: {shard} appears twice. To see it more often, give it a weight: '{shard}@2'.")
