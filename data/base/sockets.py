"""Find the TCP connections that libraries opened in this process and do not close. Forked processes inherit them."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connection:
    """An open TCP socket of this process.

    descriptor: its file descriptor. inode: distinguishes this socket from a later one with the same descriptor. ports:
    the local and the remote port; the local one alone for a socket that is not connected.
    """

    descriptor: int
    inode: int
    ports: frozenset[int] = field(compare=False)

    def shut_down(self) -> None:
        """Shut this TCP connection down in both directions, also for other processes that share its socket.

        A listening socket stays open. Nothing happens if the socket was closed already.
        """
        with suppress(OSError):  # closed, or not connected
            if os.fstat(self.descriptor).st_ino == self.inode:
                with closing(_copy(self.descriptor)) as copy:
                    copy.getpeername()  # raises for a listening socket
                    copy.shutdown(socket.SHUT_RDWR)

    def close_here(self) -> None:
        """Close this TCP socket in this process only: its file descriptor then refers to /dev/null.

        Later use of the socket fails. Other processes that share it are not affected. It must still be open: a new file
        with the same descriptor would be closed instead.
        """
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.descriptor)
        os.close(null)


def open_connections() -> Iterator[Connection]:
    """Yield the open TCP sockets of this process, including listening ones."""
    for descriptor in [int(name) for name in os.listdir("/dev/fd")]:
        with suppress(OSError):  # listdir's own descriptor is closed by now
            facts = os.fstat(descriptor)
            if stat.S_ISSOCK(facts.st_mode):
                with closing(_copy(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield Connection(descriptor, facts.st_ino, frozenset(_ports(copy)))


def _copy(descriptor: int) -> socket.socket:
    """Return a socket object for a copy of the file descriptor. Closing the object leaves the original open."""
    blocking = os.get_blocking(descriptor)
    copy = socket.socket(fileno=os.dup(descriptor))
    os.set_blocking(descriptor, blocking)  # a default timeout makes Python change this flag, which the copies share
    return copy


def _ports(copy: socket.socket) -> Iterator[int]:
    for name in (copy.getsockname, copy.getpeername):
        with suppress(OSError):  # not connected
            yield name()[1]
