"""The files of a checkpoint that ranks other than 0 write, in a folder beside it; rank 0 moves them to its own."""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dyad.data.base.files import open_foreign, remove
from dyad.data.base.json_text import read_json

Part = tuple[int, int, str]  # which of how many parts, and a name of the attempt that all ranks share
PARTS, FAILED = ".parts", ".failed"  # suffixes of the folder, and of a file in it with the error of a rank


def parts_folder(final: Path, part: Part) -> Path:
    return final.with_name(f".{final.name}.{part[2]}{PARTS}")


def give_up(final: Path, part: Part, error: Exception) -> None:
    """Leave the error of this rank for `collect` on rank 0. Rank 0 itself deletes all parts, to free the disk."""
    parts = parts_folder(final, part)
    if part[0] == 0:
        remove(parts)
        return
    with suppress(OSError):  # a full disk still takes an empty file
        (parts / f"{part[0]}{FAILED}").write_text(str(error))


def collect(folder: Path, final: Path, part: Part, wait: float) -> dict[str, dict[str, Any]]:
    """Move the files that the other ranks wrote into `folder`; return their entries of the manifest.

    wait: the seconds that they may take. Raises OSError when they take longer, or when one of them gives up.
    """
    parts, entries, end = parts_folder(final, part), {}, monotonic() + wait
    for number in range(1, part[1]):
        listed = parts / f"{number}.json"
        while not listed.exists():
            for failed in parts.glob(f"*{FAILED}"):
                with open_foreign(failed) as file:
                    reason = file.read().decode() or "is its disk full?"
                raise OSError(f"rank {failed.stem} cannot write its part: {reason}")
            if monotonic() > end:
                raise OSError(f"rank {number} has not written its part after {wait:g} s")
            sleep(0.05)
        entries |= read_json(listed)
    for name in entries:
        os.rename(parts / name, folder / name)
    remove(parts)
    return entries
