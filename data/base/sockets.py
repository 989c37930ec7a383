"""TCP connections of this process that its libraries opened and do not close. Forked processes inherit them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connection:
    """An open TCP socket. inode: tells this socket from a later one with the same descriptor. ports: local, remote."""

    descriptor: int
    inode: int
    ports: frozenset[int] = field(compare=False)

    def shut_down(self) -> None:
        """Shut the connection down for both sides, also in processes that share it. A listening socket stays open."""
        with suppress(OSError):  # closed, or not connected
            if os.fstat(self.descriptor).st_ino == self.inode:
                with closing(_copy(self.descriptor)) as copy:
                    copy.getpeername()  # raises for a listening socket
                    copy.shutdown(socket.SHUT_RDWR)

    def close_here(self) -> None:
        """Close it in this process only. The descriptor then refers to /dev/null, so that later use fails."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.descriptor)
        os.close(null)


def open_connections() -> Iterator[Connection]:
    """The open TCP sockets of this process, also listening ones."""
    for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
        with suppress(OSError):  # listdir's own descriptor is closed by now
            facts = os.fstat(descriptor)
            if stat.S_ISSOCK(facts.st_mode):
                with closing(_copy(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield Connection(descriptor, facts.st_ino, frozenset(_ports(copy)))


def _copy(descriptor: int) -> socket.socket:
    """A socket object for a copy of the descriptor. Closing it leaves the original open."""
    blocking = os.get_blocking(descriptor)
    copy = socket.socket(fileno=os.dup(descriptor))
    os.set_blocking(descriptor, blocking)  # a default timeout makes Python change this flag, which the copies share
    return copy


def _ports(copy: socket.socket) -> Iterator[int]:
    for name in (copy.getsockname, copy.getpeername):
        with suppress(OSError):  # not connected
            yield name()[1]
