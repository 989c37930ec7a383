"""What is derived from data files and kept: in `.index/` beside them, or in the user's cache.

Files are written by rename, so that whoever reads sees a whole one or none; arrays are mapped into memory, so that no
process holds what may be gigabytes. Each is sealed with the number of its folder on this disk: what came along with
the data, by download or copy, is not believed but made anew.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.keys import Int64s
from data.storage import scheme_of, shard_name


def folders(path: str) -> list[Path]:
    """Where files derived from `path` may be: beside it, or in the user's cache when that cannot be written."""
    remote = scheme_of(path)
    parent = path.rpartition("/")[0] if remote else os.path.dirname(os.path.realpath(path))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    cached = cache / "dyad" / "index" / hashlib.sha256(parent.encode()).hexdigest()[:16]
    beside = Path(parent) / ".index"
    return [cached] if remote or beside.is_symlink() else [beside, cached]  # a link could lead anywhere


def sealed(folder: Path, facts: object) -> str:
    """A digest of `facts` as JSON that holds in this folder alone. Raises OSError when there is none."""
    return hashlib.sha256(json.dumps([folder.stat().st_ino, facts]).encode()).hexdigest()


def keep(path: str, contents: Callable[[Path], dict[str, bytes | memoryview]]) -> Path:
    """Write files by name, in order, into the first folder for `path` that takes them; returns it."""
    failures = []
    for folder in folders(path):
        try:
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o755)  # as open to others as the data beside it
            for name, content in contents(folder).items():
                _replace(folder / name, content)
            return folder
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
    raise DataError(f"the index of {path} cannot be written ({'; '.join(failures)}). Set XDG_CACHE_HOME.")


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


def forget_others(folder: Path, prefix: str, name: str) -> None:
    """Drop the arrays of earlier states: `prefix`.<16 hexadecimal digits>.npy, except `name`."""
    for found in folder.glob(f"{glob.escape(prefix)}.{'[0-9a-f]' * 16}.npy"):
        if found.name != name:
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
    files = [*map(shard_name, paths), *(other if scheme_of(other) else os.path.realpath(other) for other in others)]
    prefix = f"{shard_name(paths[0])}.{kind}-{hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]}"
    name_in = lambda folder: f"{prefix}.{sealed(folder, list(made_of))[:16]}.npy"  # noqa: E731
    for folder in folders(paths[0]):
        with suppress(OSError):  # no folder, or one that we may not look into
            if os.path.isfile(folder / name_in(folder)):
                return Mapped(folder / name_in(folder))
    content = io.BytesIO()
    np.save(content, make(), allow_pickle=False)
    folder = keep(paths[0], lambda folder: {name_in(folder): content.getbuffer()})
    forget_others(folder, prefix, name_in(folder))
    return Mapped(folder / name_in(folder))
