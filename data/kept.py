"""What is derived from data files and kept: in `.index/` beside them, or in the user's cache.

`NAME.json` holds the facts and names the array, `NAME.<digest of its content>.npy`, which is mapped into memory, so
that no process holds what may be gigabytes. Files are written by rename, the JSON last: whoever reads sees all or none.

The JSON carries seals over its facts, one for each folder and user that made them. It is believed when it was made in
this folder (the seal holds the folder's number on its disk), or by this user (the seal is made with a key in the user's
cache, so that it holds in copies and where such numbers change; the array's content is compared with the facts).
Anything else is made anew. Who finds the same facts adds seals to those that are there, so that nodes agree.
"""

from __future__ import annotations

import glob
import hashlib
import hmac
import io
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.json_text import read_json
from data.keys import Int64s
from data.storage import scheme_of, shard_name

KEY, KEY_BYTES = "index.key", 32
MOST_SEALS = 8  # a stranger who could send many would try the numbers of all folders


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dyad"


def folders(path: str) -> list[Path]:
    """Where files derived from `path` may be: beside it, or in the user's cache when that cannot be written."""
    remote = scheme_of(path)
    parent = path.rpartition("/")[0] if remote else os.path.dirname(os.path.realpath(path))
    cached = _cache() / "index" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    beside = Path(parent) / ".index"
    return [cached] if remote or beside.is_symlink() else [beside, cached]  # a link could lead anywhere


def believed(path: str, name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(array, facts) of each `name`.json derived from `path` that was made in its folder or by this user."""
    for folder in folders(path):
        facts, seals = _read(folder / f"{name}.json")
        with suppress(OSError, KeyError, TypeError):  # no array
            array = folder / facts["table_file"]
            if (facts["name"] == name and array.is_file()) and (
                _folders_seal(folder, facts) in seals
                or (_users_seal(facts) in seals and _digest(array) == facts["table_sha256"])
            ):
                yield array, facts


def keep(path: str, name: str, facts: dict[str, Any], content: np.ndarray) -> Path:
    """Write an array and its facts (plain JSON) into the first folder for `path` that takes them; returns its path.

    The array of an earlier state is dropped.
    """
    written = io.BytesIO()
    np.save(written, content, allow_pickle=False)
    sha256 = hashlib.sha256(written.getbuffer()).hexdigest()
    facts = json.loads(json.dumps(facts)) | {"table_file": f"{name}.{sha256[:16]}.npy", "table_sha256": sha256}
    _make_key()
    failures = []
    for folder in folders(path):
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)  # as open to others as the data beside it
            array = folder / facts["table_file"]
            same = array.is_file() and array.stat().st_size == written.tell() and _digest(array) == sha256
            if not same:  # else other processes may have mapped it
                _replace(array, written.getbuffer())
            described = {**facts, "seals": _seals(folder, name, facts)}
            _replace(folder / f"{name}.json", json.dumps(described, indent=1).encode())
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
            continue
        _forget_others(folder, name, array.name)
        return array
    raise DataError(f"the index of {path} cannot be written ({'; '.join(failures)}). Set XDG_CACHE_HOME.")


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Facts and seals; none of either where there is no such file, or none of ours."""
    try:
        facts = read_json(path)
        return facts, [seal for seal in facts.pop("seals")[:MOST_SEALS] if isinstance(seal, str)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, []


def _seals(folder: Path, name: str, facts: dict[str, Any]) -> list[str]:
    """Ours, then those of others who found the same facts."""
    ours = [seal for seal in (_folders_seal(folder, facts), _users_seal(facts)) if seal]
    there, theirs = _read(folder / f"{name}.json")
    return [*ours, *(seal for seal in theirs if there == facts and seal not in ours)][:MOST_SEALS]


def _folders_seal(folder: Path, facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([folder.stat().st_ino, facts]).encode()).hexdigest()


def _users_seal(facts: dict[str, Any]) -> str | None:
    try:
        key = (_cache() / KEY).read_bytes()
    except OSError:
        return None
    return hmac.new(key, json.dumps(facts).encode(), "sha256").hexdigest() if len(key) == KEY_BYTES else None


def _make_key() -> None:
    """The user's key, if there is none and the cache can be written; of many processes at once, one makes it."""
    file = _cache() / KEY
    with suppress(OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".") as made:  # of mode 0600
                made.write(secrets.token_bytes(KEY_BYTES))
                made.flush()
                os.fsync(made.fileno())
                os.link(made.name, file)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, content: bytes | memoryview) -> None:
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


def _forget_others(folder: Path, name: str, array: str) -> None:
    """Drop the arrays of earlier states: `name`.<16 hexadecimal digits>.npy, except `array`."""
    for found in folder.glob(f"{glob.escape(name)}.{'[0-9a-f]' * 16}.npy"):
        if found.name != array:
            found.unlink(missing_ok=True)


class Mapped:
    """An int64 array in a file, mapped into memory; pickled as its path."""

    def __init__(self, path: Path) -> None:
        """Raises DataError when the file was damaged or taken away."""
        self.path = path
        try:
            self.array: Int64s = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            if self.array.dtype != np.int64:
                raise ValueError(f"it holds {self.array.dtype}")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: this index is damaged ({error}); delete it.") from error

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        return Mapped, (self.path,)


def kept(
    paths: Sequence[str], kind: str, others: Sequence[str], made_of: Sequence[str], make: Callable[[], Int64s]
) -> Mapped:
    """The array that `make` derives from the files `paths` and `others`, made once for each state `made_of` of them.

    It is kept beside the first of `paths`; the array of an earlier state of the same files is dropped.
    """
    here = "/" if scheme_of(paths[0]) else os.path.dirname(os.path.realpath(paths[0]))
    places = (other if scheme_of(other) else os.path.relpath(os.path.realpath(other), here) for other in others)
    files = json.dumps([*map(shard_name, paths), *places])
    name = f"{shard_name(paths[0])}.{kind}-{hashlib.sha256(files.encode()).hexdigest()[:8]}"
    facts: dict[str, Any] = {"name": name, "made_of": list(made_of)}
    for array, known in believed(paths[0], name):
        if known | facts == known:
            return Mapped(array)
    return Mapped(keep(paths[0], name, facts, make()))
