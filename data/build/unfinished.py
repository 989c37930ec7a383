"""Keep the finished work of a command that is stopped, in a folder beside the file that it makes."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import hold_lock, is_held, remove, setting_errors


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Context manager that yields the folder `.NAME.build` beside the new file `out`, for unfinished work.

    The folder has the files that an earlier, stopped process left in it. It is deleted when the block ends without an
    error; after an error it stays unless it is empty. The folder of `out` must exist. Raises ConfigError when another
    process works on the same file, and in place of an OSError of the block.
    """
    folder = out.with_name(f".{out.name}.build")
    with setting_errors(f"out={out}"):
        folder.mkdir(exist_ok=True)
        if is_held(folder):
            raise ConfigError(f"out={out}: another process is building it")
        with hold_lock(folder):
            try:
                yield folder
                remove(folder)
            finally:
                with suppress(OSError):  # the folder has work in it, or was deleted
                    folder.rmdir()


def lines_done(path: Path, identity: str) -> int:
    """Prepare a file of finished lines to be continued, and return the number of complete lines after its first line.

    identity: a digest of the inputs and options of the work, which must be the first line. A file that is missing or
    has another first line is replaced by one with only this line. An incomplete last line, which a killed process left,
    is cut off.
    """
    head = f"{identity}\n".encode()
    with path.open("ab+") as file:
        file.seek(0)
        if file.readline() != head:
            file.truncate(0)
            file.write(head)
            return 0
        count, end = 0, file.tell()
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        file.truncate(end)
        return count
