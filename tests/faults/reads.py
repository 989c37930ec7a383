"""`python -m train` (or $MODULE) as a rank of one of several machines of $PER_MACHINE ranks, that counts what it reads.

It has the variables that torchrun gives it there. With $CACHES each machine has a cache folder of its own, below that.
When it ends, $READS/<rank>.json has the bytes of the files that it read to their end: to hash them, or to scan a shard.
It is without what faults.lean takes from it.
"""

import atexit
import io
import json
import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, cast

from faults import lean  # noqa: F401

from dyad.data.shards import storage

rank, of_machine = int(os.environ["RANK"]), int(os.environ["PER_MACHINE"])
os.environ |= {"LOCAL_RANK": str(rank % of_machine), "LOCAL_WORLD_SIZE": str(of_machine)}
if "CACHES" in os.environ:
    os.environ["XDG_CACHE_HOME"] = f"{os.environ['CACHES']}/{rank // of_machine}"
reads: Counter[str] = Counter()
open_stream = storage.open_stream


class Counted(io.FileIO):
    """A file that counts as read, as often as its end is met: the bytes since then."""

    def __init__(self, path: str, raw: BinaryIO) -> None:
        super().__init__(os.dup(raw.fileno()))
        self.path, self.count = path, 0
        raw.close()

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer) or 0
        self.count += count
        if count == 0:
            reads[self.path] += self.count
            self.count = 0
        return count


def write() -> None:
    (Path(os.environ["READS"]) / f"{rank}.json").write_text(json.dumps(reads))


storage.open_stream = lambda path: cast(BinaryIO, Counted(path, open_stream(path)))
atexit.register(write)
runpy.run_module(os.environ.get("MODULE", "train"), run_name="__main__", alter_sys=True)
