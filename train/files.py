"""Writes that are there whole or not at all, also after a power cut and on a full disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

from data.errors import HardwareError

NAMED = 8  # damaged lines that a message names


def sync(path: Path) -> None:
    """Wait until the disk holds `path`, a file (its bytes) or a folder (its names)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one move: a reader, or a crash, finds the old file or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with new_file(temporary) as file:
            file.write(content)
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # what the user knows
        raise
    sync(path.parent)


def new_file(path: Path) -> BinaryIO:
    """A file to write. What stood there goes first: a link there would lead the writer elsewhere."""
    path.unlink(missing_ok=True)
    return path.open("xb")


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """What cannot be written inside is told in a line: raises HardwareError for an OSError."""
    try:
        yield
    except OSError as error:
        raise HardwareError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    replace(path, (json.dumps(value, indent=1) + "\n").encode())


def read_lines(path: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of metrics.jsonl or ledger.jsonl and its record, an object whose `step` is a whole number.

    Other lines are left out, and `say` hears which. It does not hear of a last line without end, torn by a kill.
    """
    damaged: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line.decode())
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record
            elif line.endswith(b"\n"):
                damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:NAMED])) + f" and {len(damaged) - NAMED} more" * (len(damaged) > NAMED)
        say(f"{path}: damaged, left out: line {shown}")


def remove(path: Path) -> None:
    """Delete a folder of ours as far as the disk lets us; of a link the link alone, never what it leads to."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class LineFile:
    """A file that grows by whole lines. Lines that the disk does not take wait, and come with the first that it does.

    say: hears, once each time it begins, that the disk takes no more, and that it does again. Any thread may write.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file: FileIO | None = None
        self._waiting, self._failing = b"", False
        self._lock = RLock()  # again by the same thread: `say` may come back here
        with suppress(OSError):
            self._pour()

    def write(self, line: str) -> None:
        """The line and its end."""
        with self._lock:
            self._waiting += line.encode() + b"\n"
            try:
                self._pour()
            except OSError as error:
                if not self._failing:
                    self._failing = True
                    self._say(f"{self._path} takes no more lines ({error.strerror}): they wait in memory")
                return
            if self._failing:
                self._failing = False
                self._say(f"{self._path} has all its lines again")

    def sync(self) -> None:
        """Wait until the disk holds every line. Raises OSError when it does not take them."""
        with self._lock:
            file = self._pour()
        os.fsync(file.fileno())

    def close(self) -> None:
        with self._lock:
            try:
                self._pour()
            except OSError as error:
                lines = self._waiting.count(b"\n")
                self._say(f"{self._path} lacks its last {lines} lines ({error.strerror})")
            if self._file:
                self._file.close()

    def _pour(self) -> FileIO:
        """Everything that waits; or nothing, also where the disk took a part. Returns the file."""
        self._file = file = self._file or self._path.open("ab", buffering=0)
        end, written = os.fstat(file.fileno()).st_size, 0
        try:
            while written < len(self._waiting):
                written += file.write(self._waiting[written:])
        except OSError:
            file.truncate(end)
            raise
        self._waiting = b""
        return file
