"""The files of a checkpoint that ranks other than 0 write, in a folder beside it; rank 0 moves them to its own."""

import os
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dyad.data.base.files import remove
from dyad.data.base.json_text import read_json

Part = tuple[int, int, str]  # which of how many parts, and a name of the attempt that all ranks share
PARTS = ".parts"  # suffix of the folder


def parts_folder(final: Path, part: Part) -> Path:
    return final.with_name(f".{final.name}.{part[2]}{PARTS}")


def collect(folder: Path, final: Path, part: Part, wait: float) -> dict[str, dict[str, Any]]:
    """Move the files that the other ranks wrote into `folder`; return their entries of the manifest.

    wait: the seconds that they may take. Raises OSError when they take longer.
    """
    parts, entries, end = parts_folder(final, part), {}, monotonic() + wait
    for number in range(1, part[1]):
        listed = parts / f"{number}.json"
        while not listed.exists():
            if monotonic() > end:
                raise OSError(f"rank {number} has not written its part after {wait:g} s")
            sleep(0.05)
        entries |= read_json(listed)
    for name in entries:
        os.rename(parts / name, folder / name)
    remove(parts)
    return entries
