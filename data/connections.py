"""The network connections of this process: libraries hold them without a way to end them, and forks inherit them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connection:
    """A TCP socket: its descriptor, the inode that tells it from a later one of that number, and its ports."""

    descriptor: int
    inode: int
    ports: frozenset[int] = field(compare=False)

    def cut(self) -> None:
        """End it for both sides at once, whoever else holds it. One that listens stays."""
        with suppress(OSError):  # closed, or not connected
            if os.fstat(self.descriptor).st_ino == self.inode:
                with closing(_copy(self.descriptor)) as own:
                    own.getpeername()
                    own.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """Here, not for others who hold it. The number stays taken, so that what still uses it fails."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self.descriptor)
        os.close(nowhere)


def connections() -> Iterator[Connection]:
    """Those that are open in this process, listening ones too."""
    for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
        with suppress(OSError):  # the list's own is closed
            facts = os.fstat(descriptor)
            if stat.S_ISSOCK(facts.st_mode):
                with closing(_copy(descriptor)) as own:
                    if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                        yield Connection(descriptor, facts.st_ino, frozenset(_ports(own)))


def _copy(descriptor: int) -> socket.socket:
    blocking = os.get_blocking(descriptor)
    copy = socket.socket(fileno=os.dup(descriptor))
    os.set_blocking(descriptor, blocking)  # Python has changed it for all who hold it when it has a default timeout
    return copy


def _ports(own: socket.socket) -> Iterator[int]:
    for name in (own.getsockname, own.getpeername):
        with suppress(OSError):  # not connected
            yield name()[1]
