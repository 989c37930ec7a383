"""Files that are written completely or not at all, also at a power cut and on a full disk; folders likewise, but for a
power cut. Torch-free."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

from dyad.data.base.errors import HardwareError

NAMED = 8  # damaged lines that a message names
UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # a folder whose file system or rights allow no fsync of it


def sync(path: Path) -> None:
    """fsync a file (its bytes) or a folder (the names in it)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A context that gives a file to write. The file is moved to `path` when the block ends, deleted when it raises.

    A reader, also after a crash, finds the old file or the new one, never a part of one. temporary: where the file is
    until the move, in the same folder; needed where several processes may write `path` at the same time. An OSError
    names `path`.
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)  # a symbolic link there would lead the writer elsewhere
        with temporary.open("xb") as file:
            yield file
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # the user does not know the temporary name
        raise
    try:
        sync(path.parent)
    except OSError as error:
        if error.errno not in UNSYNCABLE:
            raise


@contextmanager
def whole_folder(path: Path, temporary: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """A context that gives a new folder to fill. It is renamed to `path` when the block ends, deleted when it raises.

    temporary: as in `whole_file`. replace: whether an existing folder `path` is replaced: it is first renamed to
    `.NAME.old`, where a kill between the two renames leaves it. Without `replace`, OSError is raised when `path` exists
    and is not empty. A power cut may lose the bytes of files that the block did not sync.
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    remove(temporary)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if replace and path.is_dir():
            remove(old)
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            if replace and old.is_dir():
                os.replace(old, path)
            raise
    finally:
        remove(temporary)
    if replace:
        remove(old)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file by `whole_file`."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """A context that turns an OSError into a HardwareError, which names the file, or `folder` if none is known."""
    try:
        yield
    except OSError as error:
        raise HardwareError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON by `whole_file`."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def read_lines(path: Path, log: Callable[[str], None] = lambda line: None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of metrics.jsonl or ledger.jsonl and its record, a JSON object with an integer `step`.

    Other lines are left out, and `log` gets a message with their numbers. A last line without an end, which a kill
    leaves, is not reported.
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
        listed = ", ".join(map(str, damaged[:NAMED])) + f" and {len(damaged) - NAMED} more" * (len(damaged) > NAMED)
        log(f"{path}: damaged, left out: line {listed}")


def remove(path: Path) -> None:
    """Delete a folder and ignore errors. Of a symbolic link only the link is deleted, never its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class LineFile:
    """A file that grows by whole lines. Lines that cannot be written wait in memory for the next write that succeeds.

    log: gets one line when writing begins to fail, and one when it works again. Any thread may write.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._file: FileIO | None = None
        self._waiting, self._failing = b"", False
        self._lock = RLock()  # reentrant: `log` may call `write` of this file
        with suppress(OSError):
            self._flush()

    def write(self, line: str) -> None:
        """Append a line; a newline is added."""
        with self._lock:
            self._waiting += line.encode() + b"\n"
            was_failing, self._failing = self._failing, False
            try:
                self._flush()
            except OSError as error:
                self._failing = True
                if not was_failing:
                    self._log(f"{self._path} takes no more lines ({error.strerror}): they wait in memory")
                return
            if was_failing:
                self._log(f"{self._path} has all its lines again")

    def sync(self) -> None:
        """Write all waiting lines and wait until the disk holds them. Raises OSError when they cannot be written."""
        with self._lock:
            file = self._flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Write all waiting lines, or log how many are lost, and close the file."""
        with self._lock:
            try:
                self._flush()
            except OSError as error:
                lines = self._waiting.count(b"\n")
                self._log(f"{self._path} lacks its last {lines} lines ({error.strerror})")
            if self._file:
                self._file.close()

    def _flush(self) -> FileIO:
        """Write all waiting bytes and return the file. On an OSError the file keeps its old length."""
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
