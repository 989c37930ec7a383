"""Compute the SHA-256 of the files of a checkpoint, once on each machine as long as a file stays the same.

A resume checks the files twice: when it looks for the newest undamaged checkpoint, and when each rank loads it. Most of
the time of reading is spent on the SHA-256.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dyad.data.shards.storage import sha256_of
from dyad.train.distributed.agreement import only_on
from dyad.train.distributed.world import World, gather_objects

# Time stamps of file systems are coarse: a file that changed less than this many seconds before it was read may change
# again without a new time stamp, so its digest is not kept.
SETTLED = 2.0


class Stamp(NamedTuple):
    """Identifies the content of a file that has not changed for SETTLED seconds: a later change gives another stamp.

    path: the resolved path. size: in bytes. mtime, ctime: in nanoseconds; programs can set mtime, but not ctime.
    """

    path: str
    inode: int
    size: int
    mtime: int
    ctime: int


_KNOWN: dict[Stamp, str] = {}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal.

    The digest is kept in this process, and a file that is unchanged since is not read again. No digest is kept of a
    file that changed less than SETTLED seconds before it was read. Raises OSError if the file cannot be read.
    """
    stamp = _stamp(path)
    if stamp in _KNOWN:
        return _KNOWN[stamp]
    begun, digest = time.time(), sha256_of(path)
    if max(stamp.mtime, stamp.ctime) < (begun - SETTLED) * 1e9 and _stamp(path) == stamp:
        _KNOWN[stamp] = digest
    return digest


def once_a_machine(world: World, check: Callable[[], None]) -> None:
    """Run `check` on the first rank of each machine, then give the digests that it keeps to the machine's other ranks.

    On those ranks `digest_of` then returns them without reading the files. check: calls `digest_of` for the files, as
    Checkpoint.verify does, and must not communicate. Every rank must call once_a_machine. The ranks of a machine must
    be consecutive and have LOCAL_RANK set, as under torchrun. An error of any rank is raised on all ranks, as in
    raise_on_all (train/distributed/agreement.py).
    """
    own = int(os.environ.get("LOCAL_RANK", "0"))
    only_on(world, own == 0, check)
    machine = world.rank - own  # the first rank of this machine
    for of_machine, known in gather_objects((machine, _KNOWN if own == 0 else {}), world):
        if of_machine == machine:
            _KNOWN.update(known)


def _stamp(path: Path) -> Stamp:
    """Return the Stamp of a file as it is now. Raises OSError if there is no such file."""
    found = os.stat(path)
    return Stamp(os.path.realpath(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
