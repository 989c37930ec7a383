"""Parse values such as data.train into lists of shards: paths, folders, globs, brace lists, URLs, each with a
weight."""

import glob
import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from dyad.data.base.errors import ConfigError, nearest
from dyad.data.base.progress import print_once
from dyad.data.base.secrets import HIDDEN
from dyad.data.shards.scan_tar import unread_images
from dyad.data.shards.storage import SCHEMES, list_remote, scheme_of, shard_name

SHARDS = (".tar", ".jsonl")
ROOT, SAMPLES = Path(__file__).resolve().parents[2], Path("data/samples")  # an installed wheel has no samples
PACKED = (".gz", ".zst", ".tgz")
HEAVIEST = 10**6  # the largest weight of a source
LISTED_SCHEMES = ("s3", "gs", "hf", "memory")  # URL schemes whose folders can be listed; http servers cannot
Tables = Callable[[str], Sequence[str]]  # path → the shards that its table is read from; empty if it is no table


@dataclass(frozen=True)
class WrittenSource:
    """A source as the user wrote it, before its shards are looked up.

    path: path or URL. weight: how often each of its samples appears per epoch. question_prefix, passage_prefix: texts
    that begin its questions and passages; None: data.question.prefix and data.passage.prefix.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str
    weight: float = 1.0
    question_prefix: str | None = None
    passage_prefix: str | None = None

    def digest(self, content: str) -> str:
        """Return a digest of what training reads from this source: a hash of `content` and the prefixes.

        Without prefixes it is `content` unchanged. content: a digest of the data of the source.
        """
        prefixes = (self.question_prefix, self.passage_prefix)
        return content if prefixes == (None, None) else hashlib.sha256(repr((content, prefixes)).encode()).hexdigest()


@dataclass(frozen=True)
class ShardSource:
    """Shards, paths or URLs, that share one weight. weight: how often each of their samples appears per epoch."""

    shards: tuple[str, ...]
    weight: float = 1.0


def parse_sources(
    value: str | Sequence[Any],
    key: str = "data.train",
    suffixes: Sequence[str] = SHARDS,
    tables: Tables = lambda path: (),
) -> list[ShardSource]:
    """Parse a configuration value into sources (lists of shards with a weight), and look up their files.

    value: paths, folders, globs, brace lists or URLs, joined by '::' or given as a list; each may end in a weight such
    as '@2'. A mapping may stand for one of them, as in `written_sources`. Each part becomes one source, in this order.
    The shards of a folder or glob are sorted by name, hidden files left out; if one of them is a .tar, only .tar and
    .jsonl files are taken. key: the configuration key, for messages. suffixes: the ends of names of files that are
    shards. tables: returns the shards that the table at a path is read from; nothing for a path that is no table.
    Raises ConfigError as `written_sources` does; when a part matches nothing, does not end in one of `suffixes` and is
    no table, has a brace that is not closed, an unknown URL scheme, redacted credentials, or a question or passage
    prefix; when a remote folder cannot be listed; and when a path occurs more than once. Errors of `tables` are raised
    too. A single remote shard is not looked at.
    """
    written = written_sources(value, key)
    refuse_prefixes(written, key)
    sources = [ShardSource(tuple(_shards(each.path, key, tuple(suffixes), tables)), each.weight) for each in written]
    check_unique([shard for source in sources for shard in source.shards], key)
    return sources


def files_of(value: str | Sequence[Any], key: str, suffixes: Sequence[str], tables: Tables) -> list[str]:
    """Return the paths of the files of all sources that `value` names; weights are dropped.

    Arguments and errors as of `parse_sources`.
    """
    return [file for source in parse_sources(value, key, suffixes, tables) for file in source.shards]


def unweighted_files(
    value: str | Sequence[Any], key: str, suffixes: Sequence[str], why: str, tables: Tables = lambda path: ()
) -> list[str]:
    """Return the paths of the files of all sources that `value` names, none of which may have a sampling weight.

    Raises ConfigError for a weight (path@2), with a message that ends in `why`. Other arguments and errors as of
    `parse_sources`.
    """
    sources = parse_sources(value, key, suffixes, tables)
    if any(source.weight != 1 for source in sources):
        raise ConfigError(f"{key}={value}: {why}")
    return [file for source in sources for file in source.shards]


def refuse_prefixes(written: Iterable[WrittenSource], key: str) -> None:
    """Raise ConfigError, naming the configuration key `key`, if a source has a question or passage prefix."""
    if named := [source.path for source in written if source.digest("")]:
        raise ConfigError(f"{key}: {named[0]}: prefixes are for questions and passages of data.train.")


def written_sources(value: str | Sequence[Any], key: str) -> list[WrittenSource]:
    """Parse a configuration value into sources, without a look at the files.

    A text, or each text of a list, is split at '::'; the weight of 'a.tar@2' is 2, and 1 when none is written. An entry
    may also be a mapping with the fields of WrittenSource. The result has at least one source. key: the configuration
    key, for messages. Raises ConfigError for an empty part, a weight that is not a positive number of at most HEAVIEST,
    and a mapping with unknown names or wrong values.
    """
    entries = [value] if isinstance(value, str | Mapping) else value
    known = isinstance(entries, Sequence) and all(isinstance(entry, str | Mapping) for entry in entries)
    listed = [[entry] if isinstance(entry, Mapping) else entry.split("::") for entry in entries] if known else []
    parts = [part.strip() if isinstance(part, str) else part for parts in listed for part in parts]
    if not parts or not all(parts):
        raise ConfigError(
            f"{key}={value!r} names no shards. Write a path (of digits alone as ./2024), a folder, a glob, "
            "'d/{000..099}.tar', several joined by '::', each with a weight like '@2' or '@0.5', or a list of these."
        )
    return [WrittenSource(*_split_weight(part, key)) if isinstance(part, str) else _parsed(part, key) for part in parts]


def _parsed(mapping: Mapping[Any, Any], key: str) -> WrittenSource:
    """Convert a mapping to a WrittenSource.

    Raises ConfigError, naming the configuration key `key`, for a missing path, an unknown name and a wrong value.
    """
    from pydantic import TypeAdapter, ValidationError  # takes longer than all else that --help imports

    try:
        source = TypeAdapter(WrittenSource).validate_python({str(name): value for name, value in mapping.items()})
        if 0 < source.weight <= HEAVIEST:
            return source
        wrong = f"weight={source.weight:g} of {source.path}: must be a positive number, like 2 or 0.5"
    except ValidationError as error:
        (first, *_) = error.errors()
        wrong = f"{first['loc'][0]} of a source: {first['msg']}"
        if "path" not in mapping:
            wrong = f"{mapping!s:.80} has no path. Data are read from files: write rows in memory to a .jsonl file"
    names = ", ".join(field.name for field in fields(WrittenSource))
    raise ConfigError(f"{key}: {wrong}. A source is written {{{names}}}.")


def _split_weight(part: str, key: str) -> tuple[str, float]:
    """Split 'a.tar@2' into ('a.tar', 2.0). If no number follows the last @, return `part` unchanged, and 1.0.

    key: the configuration key, for messages. Raises ConfigError for a number that is not positive or above HEAVIEST,
    and for a weight without a path.
    """
    path, at, number = part.rpartition("@")
    try:
        weight = float(number if at else "")
    except ValueError:
        return part, 1.0  # no @, or one inside a name
    if not path or not 0 < weight <= HEAVIEST:
        raise ConfigError(f"{key}: the weight in '{part}' must be a positive number, like '@2' or '@0.5'.")
    return path, weight


def local_path(path: str) -> str:
    """Return the path without a leading `file://`, and with the home folder in place of `~`.

    Other URLs stay as they are.
    """
    return os.path.expanduser(path.removeprefix("file://"))


def _shards(path: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Iterator[str]:
    """Yield the shards that one written path, without a weight, names.

    Other arguments are those of `parse_sources`, and so are the errors, but for those of weights, prefixes and repeated
    paths.
    """
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
        yield from (_remote if scheme_of(one) else _local)(one, key, suffixes, tables)


def _local(path: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Sequence[str]:
    """Return the shards that a local path names: those of a folder, those of a file, or those that a glob matches."""
    if os.path.isdir(path):
        return _of_folder(sorted(str(file) for file in Path(path).iterdir()), path, key, suffixes)
    if os.path.isfile(path):
        return tables(path) or [_shard(path, key, suffixes)]
    if os.path.isfile(path.rpartition("@")[0]) and (found := tables(path)):  # a split of a file
        return found
    files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    shards = _with_samples(files, suffixes) or files  # tables only where there are no shards
    found = [shard for file in shards for shard in tables(file) or [file] * file.endswith(suffixes)]
    if not found:
        raise ConfigError(f"{key}={path} matches nothing{_missing_part(path)}")
    return found


def _remote(url: str, key: str, suffixes: tuple[str, ...], tables: Tables) -> Sequence[str]:
    """Return the shards that a URL names: itself, or those of a remote folder or glob."""
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
    """Return those of the files of the folder or glob `path` that are shards; compressed ones give a printed line.

    Raises ConfigError if there is none.
    """
    if not (shards := _with_samples(files, suffixes)):
        packed = next((f" {_how_to_unpack(file)}" for file in files if file.endswith(PACKED)), "")
        unread = unread_images(Counter(os.path.splitext(file)[1].lower().removeprefix(".") for file in files))
        hint = f" Not read: {unread}" if unread else packed
        raise ConfigError(f"{key}={path} matches nothing: there is no {_either(suffixes)} file.{hint}")
    if packed := [file for file in files if file.endswith(PACKED) and not file.endswith(suffixes)]:
        kinds = Counter("".join(Path(shard_name(file)).suffixes[-2:]) for file in packed)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        print_once(f"{path}: not read: {counts}; {_how_to_unpack(packed[0])}")
    return shards


def _with_samples(files: list[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the files of a folder or glob that have samples: those that are not hidden and end in one of `suffixes`.

    If one of them is a .tar, they must end in one of SHARDS instead, because img2dataset writes a table and a .json
    file of statistics beside each shard.
    """
    shown = [file for file in files if not shard_name(file).startswith(".")]
    beside_tar = any(file.endswith(".tar") for file in shown)
    return [file for file in shown if file.endswith(SHARDS if beside_tar else suffixes)]


def _shard(path: str, key: str, suffixes: tuple[str, ...]) -> str:
    """Return `path`. Raises ConfigError if it does not end in one of `suffixes`."""
    if not shard_name(path).endswith(suffixes):
        why = _how_to_unpack(path) if shard_name(path).endswith(PACKED) else f"shards end in {_either(suffixes)}."
        raise ConfigError(f"{key}={path}: {why}")
    return path


def _either(suffixes: tuple[str, ...]) -> str:
    *others, last = suffixes
    return f"{', '.join(others)} or {last}" if others else last


def _how_to_unpack(path: str) -> str:
    program = "zstd -d" if path.endswith(".zst") else "gunzip -k"
    return f"compressed files cannot be read by offset: unpack it with: {program} {shlex.quote(path)}"


def _missing_part(path: str) -> str:
    """Return the end of an error message about a path that matches nothing: its first part that does not exist, or the
    folder in which a glob found nothing.

    An example is ": no 'emojy' in data/samples. Did you mean 'emoji'?".
    """
    missing = Path(path)
    while not missing.parent.is_dir():
        missing = missing.parent
    if missing.is_file():
        return f": {missing} is no folder."
    folder = f"{Path.cwd()}, the working folder" if missing.parent == Path() else missing.parent
    if glob.has_magic(missing.name):
        return f" in {folder}."
    hint = nearest(missing.name, os.listdir(missing.parent)) or _where_samples_are(path)
    return f": no '{missing.name}' in {folder}.{hint}"


def _where_samples_are(path: str) -> str:
    """Return the end of an error message, which says where the shipped samples are, if `path` is in data/samples.

    The result is "" for any other path.
    """
    if not Path(path).is_relative_to(SAMPLES):
        return ""
    if (ROOT / SAMPLES).is_dir():
        return f" The samples are in the checkout: cd {shlex.quote(str(ROOT))}"
    return f" {SAMPLES} is in a checkout of Dyad alone, not in the package: work there, or name data of yours"


def check_unique(shards: Sequence[str], key: str) -> None:
    """Raise ConfigError when a path occurs more than once in `shards`, because each of its samples would have two ids.

    Paths are compared letter by letter; links are not followed. key: the configuration key, for the message.
    """
    for shard, count in Counter(shards).items():
        if count > 1:
            raise ConfigError(f"{key}: {shard} appears twice. To see it more often, give it a weight: '{shard}@2'.")
