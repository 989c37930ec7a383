"""Files of a checkpoint that ranks other than 0 write, in a folder beside it; rank 0 moves them into the checkpoint."""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dyad.data.base.files import open_foreign, remove
from dyad.data.base.json_text import read_json

Part = tuple[int, int, str]  # index of the part, number of parts, name of this attempt to save, equal on all ranks
PARTS, FAILED = ".parts", ".failed"  # suffixes of the folder, and of a file in it with the error of a rank


def parts_folder(final: Path, part: Part) -> Path:
    """Return the path of the folder for the parts of the checkpoint `final`, equal on all ranks; it need not exist."""
    return final.with_name(f".{final.name}.{part[2]}{PARTS}")


def give_up(final: Path, part: Part, error: Exception) -> None:
    """Write the error of this rank to a file that `collect` on rank 0 finds. On rank 0, delete all parts instead.

    final: the checkpoint folder that was to be written. part: which part of it this rank writes, see Part. On a full
    disk the file is empty. The file appears whole; without it rank 0 waits until its time is up.
    """
    parts = parts_folder(final, part)
    if part[0] == 0:
        remove(parts)
        return
    begun = parts / f"{part[0]}{FAILED}.begun"
    with suppress(OSError):
        begun.write_text(str(error))
    with suppress(OSError):
        os.replace(begun, parts / f"{part[0]}{FAILED}")


def collect(folder: Path, final: Path, part: Part, wait: float) -> dict[str, dict[str, Any]]:
    """Wait for the files of the other ranks, move them into `folder`, and return their entries for the manifest.

    Rank 0 alone calls it. folder: where rank 0 writes the checkpoint, before it is renamed to `final`. part: that of
    rank 0, see Part. wait: the seconds that the other ranks may take, all together. Returns file name → its size
    ("bytes") and SHA-256 ("sha256"). The folder of the parts is deleted at the end. Raises OSError when the ranks take
    longer, when a rank called `give_up`, or when files cannot be moved; the folder of the parts then stays, so call
    `give_up`.
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
