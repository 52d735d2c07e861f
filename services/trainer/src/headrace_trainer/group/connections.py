"""The TCP connections between the ranks of a trainer group, and cutting them. Knows no torch.

Gloo has no abort: a thread that waits in one of its collectives wakes when the connection to a peer ends. Which of a
process's connections those are is found by comparing both ends with the other ranks' lists.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

End = tuple[str, int]
"""Address and port."""
Ends = tuple[End, End]
"""This process's end of a connection, and the other."""
_OWN = Path("/proc/self/fd")


def own_connections() -> list[Ends]:
    """Both ends of every TCP connection of this process; none where the system does not list them."""
    return [ends for _, ends in _connected()]


def between(own: Iterable[Ends], others: Iterable[Ends]) -> frozenset[Ends]:
    """Those of this process's connections whose other end is in the other ranks' lists."""
    theirs = {(there, here) for here, there in others}
    return frozenset(theirs.intersection(own))


def cut(wanted: frozenset[Ends], port: int = 0) -> int:
    """Shuts down these connections, and those to or from `port`; how many were found.

    Safe beside threads that open and close others: ends are looked at and shut down through one duplicate.
    """
    found = 0
    for connection, ends in _connected():
        if ends in wanted or (port and port in (ends[0][1], ends[1][1])):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


def _connected() -> Iterator[tuple[socket.socket, Ends]]:
    if not _OWN.is_dir():
        return
    for name in os.listdir(_OWN):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:  # It was closed meanwhile.
            continue
        with closing(socket.socket(fileno=duplicate)) as connection:
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = _end(connection.getsockname()), _end(connection.getpeername())
            except OSError:  # It listens, or is not connected.
                continue
            yield connection, ends


def _end(address: tuple[str, int]) -> End:
    return address[0].removeprefix("::ffff:"), address[1]
