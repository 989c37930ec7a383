"""SHA-256 of the files of a checkpoint, each computed once on a machine as long as the file stays the same.

A resume finds the newest whole checkpoint and then loads it on every rank; both check it, and a digest takes most of
the time of reading.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dyad.data.shards.storage import sha256_of
from dyad.train.distributed.agreement import only_on
from dyad.train.distributed.world import World, gather_objects

# A file system's clock ticks coarsely: a file that changed so many seconds before it was read may change again with
# the same time stamp, so its digest is not kept.
SETTLED = 2.0


class Stamp(NamedTuple):
    """A state of a file. mtime, ctime: in nanoseconds; a program can set the first, the kernel alone the second."""

    path: str
    inode: int
    size: int
    mtime: int
    ctime: int


_KNOWN: dict[Stamp, str] = {}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal, from memory if this state of the file has one already."""
    stamp = _stamp(path)
    if stamp in _KNOWN:
        return _KNOWN[stamp]
    begun, digest = time.time(), sha256_of(path)
    if max(stamp.mtime, stamp.ctime) < (begun - SETTLED) * 1e9 and _stamp(path) == stamp:
        _KNOWN[stamp] = digest
    return digest


def once_a_machine(world: World, check: Callable[[], None]) -> None:
    """Run `check` on the first rank of each machine; the other ranks of the machine then know the digests that it
    computed. Every rank must call it. An error of any rank is raised on all ranks, as in raise_on_all.
    """
    own = int(os.environ.get("LOCAL_RANK", "0"))
    only_on(world, own == 0, check)
    machine = world.rank - own  # its first rank
    for of_machine, known in gather_objects((machine, _KNOWN if own == 0 else {}), world):
        if of_machine == machine:
            _KNOWN.update(known)


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return Stamp(os.path.realpath(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
