"""Cache of arrays and shards derived from data files: in `.index/` beside them, or in the user's cache folder.

An entry NAME has two files: `NAME.<digest of its content>.npy` with the array (or .tar, .jsonl with the shard made of a
table), and `NAME.json` with a description of it, called its facts. Processes memory-map the array, because it may have
gigabytes. Both files are written atomically, the JSON last, so that a reader finds a complete entry or none.

The JSON also holds seals, which prove who wrote the entry, one for each folder and user that did. The folder's seal is
a hash of the facts and the folder's inode number. The user's seal is an HMAC of the facts with a key in the user's
cache; it stays valid in copies of the folder, so the digest of the file is compared too. An entry is used if the seal
of its present folder or of this user is valid; any other entry is made anew. A process that computes the same facts
adds its seals to the stored ones, so that several nodes or users can share a folder.
"""

import glob
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dyad.data.base.arrays import map_array
from dyad.data.base.errors import DataError
from dyad.data.base.files import hold_lock, leads_inside, open_foreign, remove_dead, whole_file
from dyad.data.base.json_text import read_json
from dyad.data.shards.content_keys import Int64s, json_digest
from dyad.data.shards.storage import scheme_of, sha256_of, shard_name

FOLDER = ".index"
TABLE_SHARD = re.compile(r"(.+)\.[0-9a-f]{8}\.[0-9a-f]{16}\.tar")  # name of a shard that was made of a table of images
KEY, KEY_BYTES = "index.key", 32
MOST_SEALS = 8  # otherwise another user could ship seals for all likely inode numbers


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dyad"


def cache_folders(path: str) -> list[Path]:
    """Return the folders that may hold cache files derived from the data file `path`, the preferred folder first.

    These are `.index` beside the data file, with symbolic links resolved (the file's own folder if that is named
    `.index`), then a folder in the user's cache (~/.cache/dyad, or below XDG_CACHE_HOME). Only the latter is returned
    for a remote path, or if `.index` is a symbolic link. The folders need not exist.
    """
    remote = scheme_of(path)
    parent = path.rpartition("/")[0] if remote else os.path.dirname(os.path.realpath(path))
    cached = _cache() / "index" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    beside = Path(parent) if os.path.basename(parent) == FOLDER else Path(parent) / FOLDER
    return [cached] if remote or beside.is_symlink() else [beside, cached]  # a link could lead anywhere


def made_from(path: str, key: str) -> tuple[str, str]:
    """Return the path of the table, and the place in it, from which the sample `key` of the shard at `path` was made.

    Of a table whose entry is in the user's cache, the path is its name alone. A shard that no table was made into is
    returned as it is.
    """
    folder, name = os.path.split(path)
    beside, own = os.path.basename(folder) == FOLDER, os.path.dirname(folder) == str(_cache() / "index")
    found, place = TABLE_SHARD.fullmatch(name), key.rpartition("/")[0]
    if not (found and place and (beside or own)):
        return path, key
    return os.path.join(os.path.dirname(folder), found[1]) if beside else found[1], place


def read_cached(path: str, name: str, wanted: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (path of the entry's file, facts) for each folder of cache_folders(path) with a valid entry `name`.

    facts: the entry's JSON description. An entry is valid if its facts have all items of `wanted` and it has a valid
    seal, the proof of who wrote it; others are skipped. The caller must put the entry's name into `wanted`.
    """
    for folder in cache_folders(path):
        facts, seals = _read(folder / f"{name}.json")
        with suppress(OSError, KeyError, TypeError):  # there is no array
            array = folder / facts["table_file"]
            if (facts | wanted == facts and array.is_file() and leads_inside(array, folder)) and (
                _folders_seal(folder, facts) in seals
                or (_users_seal(facts) in seals and sha256_of(array) == facts["table_sha256"])
            ):
                yield array, facts


def write_cached(path: str, name: str, facts: dict[str, Any], content: np.ndarray) -> Path:
    """Write an array and its facts (a plain JSON description) as the cache entry `name`; return the array file's path.

    path: the data file from which the array is derived. Errors as of `write_entry`.
    """
    return write_entry(path, name, ".npy", facts, lambda file: np.save(file, content, allow_pickle=False))


def write_entry(path: str, name: str, suffix: str, facts: dict[str, Any], write: Callable[[BinaryIO], object]) -> Path:
    """Write the cache entry `name`, a file that write(file) fills and its facts, and return the path of the file.

    path: the data file from which the entry is derived. suffix: the end of the new file's name. facts: a plain JSON
    description. The entry is written to the first of cache_folders(path) that can be written; `write` may be called for
    several folders. Files of earlier versions of the entry, and what was made of them, are deleted there. Raises
    DataError when no folder can be written or `write` raises OSError for each; other errors of `write` are raised at
    once.
    """
    _make_key()
    failures = []
    for folder in cache_folders(path):
        temporary = folder / f".{secrets.token_hex(8)}"
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)  # others may read the cache, as they may read the data
            remove_dead(folder, f".{'[0-9a-f]' * 16}")
            with temporary.open("xb") as file, hold_lock(temporary):
                os.fchmod(file.fileno(), 0o644 if scheme_of(path) else os.stat(path).st_mode & 0o644)
                write(file)
                file.flush()
                os.fsync(file.fileno())
            size, sha256 = temporary.stat().st_size, sha256_of(temporary)
            found = {"table_file": f"{name}.{sha256[:16]}{suffix}", "table_sha256": sha256}
            facts = json.loads(json.dumps(facts)) | found
            kept = folder / facts["table_file"]
            if kept.is_symlink() or not (kept.is_file() and kept.stat().st_size == size and sha256_of(kept) == sha256):
                os.replace(temporary, kept)  # an equal file stays: other processes may have mapped it
            ours = [seal for seal in (_folders_seal(folder, facts), _users_seal(facts)) if seal]
            stored, others = _read(folder / f"{name}.json")
            seals = [*ours, *(seal for seal in others if stored == facts and seal not in ours)][:MOST_SEALS]
            # the temporary name is random, because several processes may write the entry
            with whole_file(folder / f"{name}.json", folder / f".{secrets.token_hex(8)}") as file:
                os.fchmod(file.fileno(), kept.stat().st_mode & 0o644)  # as private as the data: it quotes data errors
                file.write(json.dumps({**facts, "seals": seals}, indent=1).encode())
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
            continue
        finally:
            with suppress(OSError):  # the file was moved, or there is no folder
                temporary.unlink()
        # the pattern ends with * for the entries that were made of an earlier shard, which are lost with it
        for earlier in folder.glob(f"{glob.escape(name)}.{'[0-9a-f]' * 16}{suffix}*"):
            if not earlier.name.startswith(kept.name):
                with suppress(OSError):  # the new entry is whole without this
                    earlier.unlink()
        return kept
    raise DataError(f"the index of {path} cannot be written ({'; '.join(failures)}). Set XDG_CACHE_HOME.")


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a JSON file of the cache and return its facts and at most MOST_SEALS of its seals.

    Both are empty when the file does not exist or is no cache entry.
    """
    try:
        facts = read_json(path, folder=path.parent)
        return facts, [seal for seal in facts.pop("seals")[:MOST_SEALS] if isinstance(seal, str)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, []


def _folders_seal(folder: Path, facts: dict[str, Any]) -> str:
    """Return the seal which proves that a cache entry was written in this very folder.

    It is a hash of the folder's inode number and of `facts`, the entry's JSON description. It is not valid in a copy of
    the folder.
    """
    return json_digest([folder.stat().st_ino, facts])


def _users_seal(facts: dict[str, Any]) -> str | None:
    """Return the seal which proves that this user wrote a cache entry; None when the user has no key.

    It is an HMAC of `facts`, the entry's JSON description, with the user's secret key, and is valid in any folder.
    """
    try:
        with open_foreign(_cache() / KEY, KEY_BYTES) as file:
            key = file.read()
    except (OSError, ValueError):
        return None
    return hmac.new(key, json.dumps(facts).encode(), "sha256").hexdigest() if len(key) == KEY_BYTES else None


def _make_key() -> None:
    """Create the file with the secret key by which this user seals cache entries, if there is none.

    Nothing happens if the user's cache folder cannot be written. Of several processes that try at the same time, one
    succeeds.
    """
    file = _cache() / KEY
    with suppress(OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".") as made:  # has mode 0600
                made.write(secrets.token_bytes(KEY_BYTES))
                made.flush()
                os.fsync(made.fileno())
                os.link(made.name, file)


class MemmapArray:
    """An int64 array in a .npy file, memory-mapped read-only: `array`. Pickling stores only the path of the file."""

    def __init__(self, path: Path) -> None:
        """Memory-map the int64 array in the file at `path`. Raises DataError when the file is damaged or missing, or
        holds another dtype."""
        self.path = path
        try:
            self.array: Int64s = np.asarray(map_array(path, path.parent))
            if self.array.dtype != np.int64:
                raise ValueError(f"it holds {self.array.dtype}")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: this index is damaged ({error}); delete it.") from error

    def __reduce__(self) -> tuple[type["MemmapArray"], tuple[Path]]:
        return MemmapArray, (self.path,)


def cached_array(
    paths: Sequence[str], kind: str, others: Sequence[str], made_of: Sequence[str], make: Callable[[], Int64s]
) -> MemmapArray:
    """Return the array that make() derives from the files `paths` and `others`, from the cache if it has the array.

    paths: the main files; others: further files that the array depends on. kind: what the array is, a part of its name
    in the cache. made_of: texts that describe the present content of all these files, such as SHA-256 digests. When
    they differ from the texts stored with the array, make() is called again and the new array replaces the stored one.
    The array is stored in a cache folder of the first of `paths` (see `cache_folders`). Raises DataError when no such
    folder can be written or the stored array is damaged, and the errors of `make`.
    """
    here = "/" if scheme_of(paths[0]) else os.path.dirname(os.path.realpath(paths[0]))
    relative = (other if scheme_of(other) else os.path.relpath(os.path.realpath(other), here) for other in others)
    name = f"{shard_name(paths[0])}.{kind}-{json_digest([*map(shard_name, paths), *relative])[:8]}"
    facts: dict[str, Any] = {"name": name, "made_of": list(made_of)}
    for array, _ in read_cached(paths[0], name, facts):
        return MemmapArray(array)
    return MemmapArray(write_cached(paths[0], name, facts, make()))
