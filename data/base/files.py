"""Write files atomically: completely or not at all, even at a power cut or on a full disk.

Folders are written atomically too, except at a power cut. The module also appends lines to files, and opens untrusted
files.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

from dyad.data.base.errors import ConfigError, HardwareError

NAMED = 8  # damaged lines that a message names
SETTLED = 60.0  # seconds without a change, after which an unlocked temporary file counts as left by a dead process
UNSYNCABLE = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # a folder whose file system or rights allow no fsync of it


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's list of names, to the disk by fsync. Raises OSError if this fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Context manager that yields a new binary file to write and atomically moves it to `path` when the block ends.

    The file is synced to the disk first. It is deleted when the block raises. A reader, also after a crash, finds the
    old file or the new one, never a part of a file. The folder of `path` must exist. temporary: path of the file until
    the move, in the same folder (None: `.NAME.partial`). The caller must give different paths if several processes may
    write `path` at the same time. An OSError that names the temporary file, or no file, gets the name of `path`.
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)  # a symbolic link there would lead the writer elsewhere
        with temporary.open("xb") as file, hold_lock(temporary):
            yield file
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # the user does not know the temporary name
        raise
    _sync_names(path.parent)


def _sync_names(folder: Path) -> None:
    """Write the list of names in a folder to the disk by fsync; do nothing if its file system or rights forbid it."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in UNSYNCABLE:
            raise


@contextmanager
def whole_folder(path: Path, temporary: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """Context manager that yields a new folder to fill and renames it to `path` when the block ends.

    The folder is deleted when the block raises. temporary: path of the folder until the renaming (None: `.NAME.partial`
    beside `path`); missing parents are made. replace: whether an existing folder `path` is replaced. The existing
    folder is first renamed to `.NAME.old`; it stays there if the process is killed between the two renames. A power cut
    may lose the bytes of files that the block did not sync. A temporary folder that exists already is deleted first,
    but OSError is raised while another process fills it. Raises OSError also when `path` is a file or, without
    `replace`, a folder that is not empty.
    """
    temporary = temporary or path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old")
    if is_held(temporary):
        raise OSError(errno.EBUSY, "another process is writing it", str(path))
    remove(temporary)
    try:
        temporary.mkdir(parents=True)
        with hold_lock(temporary):
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
        _sync_names(path.parent)  # before the old folder goes: a power cut must leave one of the two
        remove(old)


@contextmanager
def hold_lock(temporary: Path) -> Iterator[None]:
    """Context manager that holds a lock on an existing temporary file or folder, which says that it is in use.

    `remove_dead` of other processes then does not delete it, and `is_held` is True. The lock ends with the block or the
    process. On a file system without locks nothing is locked. Raises OSError for a path that does not exist or is a
    symbolic link.
    """
    descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for forked processes, which have the descriptor
        os.close(descriptor)


def is_held(temporary: Path) -> bool | None:
    """Whether a living process holds the lock (`hold_lock`) of a temporary file or folder; None if unknown.

    It is unknown for a path that cannot be opened (missing, no permission, a symbolic link) and for a file system
    without locks.
    """
    with suppress(OSError):
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return None


def remove_dead(folder: Path, names: str) -> None:
    """Delete the temporary files and folders in `folder` that ended processes left; ignore errors.

    names: a glob of their names. What changed in the last SETTLED seconds stays, because a writer may be about to lock
    or to rename it; so does what may be locked.
    """
    for left in folder.glob(names):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > SETTLED and is_held(left) is False:
                remove(left) if left.is_dir() else left.unlink()


def open_foreign(path: Path | str, largest: int | None = None, folder: Path | None = None) -> BinaryIO:
    """Open an untrusted file, which another user may have made, for reading bytes; the caller closes it.

    Arguments and errors as of `foreign_descriptor`.
    """
    return os.fdopen(foreign_descriptor(path, largest, folder), "rb")


def checked_path(path: Path | str, folder: Path | None = None) -> str:
    """Check an untrusted file, which another user may have made, and return its path as text.

    A library that opens files itself then gets the path; between check and opening the file could still be changed.
    Arguments and errors as of `foreign_descriptor`.
    """
    os.close(foreign_descriptor(path, folder=folder))
    return str(path)


def foreign_descriptor(path: Path | str, largest: int | None = None, folder: Path | None = None) -> int:
    """Open an untrusted file, which another user may have made, for reading, and return its file descriptor.

    The caller closes the descriptor. largest: the most bytes that the file may have; None: any size. folder: where it
    must lie after symbolic links are resolved; None: anywhere. Raises OSError, which names the path, if the file cannot
    be opened, is no regular file or lies elsewhere; ValueError, which does not name it, if it is too large, or if the
    path has a NUL or half of a surrogate pair. The file is opened without waiting and checked by its descriptor,
    because a pipe would wait for a writer and a device may never end.
    """
    if folder is not None and not leads_inside(path, folder):
        raise OSError(errno.EPERM, "a link leads out of the folder", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if largest is not None and found.st_size > largest:
            raise ValueError(f"more than {largest:,} bytes")
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def leads_inside(file: Path | str, folder: Path) -> bool:
    """Whether `file` lies in `folder` after symbolic links are resolved. In the cache of the Hugging Face hub a folder
    below `snapshots` has links to the folder `blobs` beside `snapshots`, which count as inside."""
    root, leads_to = (Path(os.path.realpath(path)) for path in (folder, file))  # a link in a circle of links: itself
    blobs = (each.parent / "blobs" for each in (root, *root.parents) if each.name == "snapshots")
    return any(leads_to.is_relative_to(allowed) for allowed in (root, *blobs))


def file_inside(folder: Path, name: str | Path) -> Path | None:
    """Return `folder / name` if it is a regular file that lies in `folder` by `leads_inside`, else None. In a folder of
    another user a link could lead to a private file, whose content would then go into a report or a tracker."""
    path = folder / name
    return path if os.path.isfile(path) and leads_inside(path, folder) else None  # isfile raises for no name at all


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to the file `path` atomically, by `whole_file`; an older file is replaced."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises HardwareError ("FILE cannot be written: …") in place of an OSError of the block.

    The message names the file of the OSError, or `folder` (a folder or file) if the OSError names none.
    """
    try:
        yield
    except OSError as error:
        raise HardwareError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def setting_errors(setting: str) -> Iterator[None]:
    """Context manager that raises ConfigError ("SETTING cannot be written: …") in place of an OSError of the block.

    setting: a key=value of the user that names what the block writes, such as out=FOLDER.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value to the file `path`, indented and with a newline at the end, atomically by `whole_file`."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def read_lines(path: Path, log: Callable[[str], None] = lambda line: None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, record) for each valid line of a JSON-lines file of a run, such as metrics.jsonl or ledger.jsonl.

    line: the bytes of the line, with its newline if it has one. record: the parsed line, a JSON object with an int
    `step`. Other lines are left out, and after the last one `log` gets a message with the numbers of the first of
    them. An invalid last line without a newline, which a killed process leaves, is not reported. Raises OSError if the
    file cannot be read.
    """
    damaged: list[int] = []
    with open_foreign(path) as file:
        for number, line in enumerate(file, 1):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line.decode())
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield line, record
            elif line.endswith(b"\n"):
                damaged.append(number)
    if damaged:
        listed = ", ".join(map(str, damaged[:NAMED])) + f" and {len(damaged) - NAMED} more" * (len(damaged) > NAMED)
        log(f"{path}: damaged, left out: line {listed}")


def free_bytes(path: Path) -> int:
    """Return the number of free bytes on the disk of `path`, or of its nearest parent if `path` does not exist."""
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free


def remove(path: Path) -> None:
    """Delete the folder `path` with all that is in it, and ignore errors; a missing folder is none.

    If `path` is a symbolic link, only the link is deleted, and an OSError is raised if this fails. A regular file is
    not deleted.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


class LineFile:
    """A file to which whole lines are appended. Lines that cannot be written wait in memory for the next write.

    The constructor makes the file if it can; the folder must exist. If the file is deleted, it is made again with all
    its lines, as soon as its folder exists. log: a function that gets one line when writing begins to fail, and one
    when it works again, or when `close` loses lines. Any thread may write.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._file: FileIO | None = None
        self._waiting, self._failing = b"", False
        self._lock = RLock()  # reentrant: `log` may call `write` of this file
        with suppress(OSError):
            self._flush()

    def write(self, line: str) -> None:
        """Append `line` and a newline to this object's file.

        If this fails, the line waits in memory, and no error is raised. The next call of `write`, `sync` or `close`
        tries again. Not to be called after `close`.
        """
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
        """Append the lines that wait in memory, because an earlier write failed, to this object's file. Then wait by
        fsync until the disk holds the whole file. Raises OSError when this fails."""
        with self._lock:
            file = self._flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Append the lines that wait in memory, because an earlier write failed, to this object's file, and close it.

        Lines that still cannot be written are lost, and a logged message gives their number. No error is raised for
        them.
        """
        with self._lock:
            try:
                self._flush()
            except OSError as error:
                lines = self._waiting.count(b"\n")
                self._log(f"{self._path} lacks its last {lines} lines ({error.strerror})")
            if self._file:
                self._file.close()

    def _flush(self) -> FileIO:
        """Append all bytes that wait in memory to this object's file, opened if needed, and return the open file. On an
        OSError, which is raised, the file keeps its old length and the bytes stay in memory."""
        if self._file and not os.fstat(self._file.fileno()).st_nlink:  # it is deleted; its bytes can still be read
            again = self._path.open("a+b", buffering=0)
            with self._file as deleted:
                deleted.seek(0)
                self._waiting = deleted.readall() + self._waiting
            self._file = again
        self._file = file = self._file or self._path.open("a+b", buffering=0)
        end, written = os.fstat(file.fileno()).st_size, 0
        try:
            while written < len(self._waiting):
                written += file.write(self._waiting[written:])
        except OSError:
            file.truncate(end)
            raise
        self._waiting = b""
        return file
