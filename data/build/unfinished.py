"""Work that is kept when it is stopped: a folder beside the new file, with a line for each item that is done."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dyad.data.base.errors import ConfigError
from dyad.data.base.files import alive, is_held, remove


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Context manager that yields the folder for the work on the new file `out`, with what an earlier, stopped process
    has left there. It is deleted when the block ends, and stays when the block raises, unless it is empty.

    Raises ConfigError when another process works on the same file, or the folder cannot be written.
    """
    folder = out.with_name(f".{out.name}.build")
    try:
        folder.mkdir(exist_ok=True)
        if is_held(folder):
            raise ConfigError(f"out={out}: another process is building it")
        with alive(folder):
            try:
                yield folder
                remove(folder)
            finally:
                with suppress(OSError):  # there is work in it, or it is gone
                    folder.rmdir()
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror or error}") from error


def lines_done(path: Path, identity: str) -> int:
    """Make a file of lines ready to be continued, and return how many whole lines it has after its first, which is
    `identity`.

    A line that a killed process has begun is cut off. A file of another identity, or without any, begins anew.
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
