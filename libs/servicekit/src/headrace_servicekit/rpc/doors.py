"""Ends connections to listening ports of this process that do not show the token in time, or are too many.

gRPC accepts whoever connects and keeps the connection, and a TLS handshake may stand still before any protocol hears of
it. So a thread looks at the process's own sockets and shuts down those of strangers: by age, and by number a peer and
in all, the oldest first. Knows no protocol: a server says which peers are known.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace_servicekit.descriptors import for_callers

STRANGER_S = 10.0
"""Seconds that a connection may take to show the token."""
SENDING_S = 60.0
"""The same where much comes meanwhile: the first message may be large, and the network slow."""
SENDING_BYTES = 256 * 1024
"""What must come between two looks at such a connection."""
OF_PEER, IN_ALL = 1 / 4, 1 / 2
"""What strangers may hold of a port's connections. A fleet that starts connects from one host, many at once."""
MANY = 16
"""Strangers that are looked at more often."""
REFUSED_CALLS = 64
"""Calls without the token by which one connection uses up its stay."""
LOOK_S, BUSY_LOOK_S = 1.0, 0.1
_OWN = Path("/dev/fd")
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
"""Where tcp_info has the bytes received (linux/tcp.h)."""


def peer_name(host: str, port: int) -> str:
    """An end of a connection, as gRPC names it."""
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


class Callers:
    """Who has shown the token to a server, and who was refused too often. Asked for each call: one look into a set."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._refused: Counter[str] = Counter()

    def admit(self, peer: str) -> None:
        """Its call bore the token."""
        if peer not in self._known:
            self._known.add(peer)
            self._refused.pop(peer, None)

    def refuse(self, peer: str) -> None:
        """Its call did not bear it."""
        self._refused[peer] += 1

    def known(self) -> frozenset[str]:
        """Peers whose connections stay."""
        return frozenset(self._known)

    def tiresome(self) -> list[str]:
        """Peers without the token that have had their calls."""
        return [peer for peer, calls in list(self._refused.items()) if calls > REFUSED_CALLS]

    def forget(self, peers: Collection[str]) -> None:
        """Their connections are over: another one may get the same port."""
        for peer in peers:
            self._known.discard(peer)
            self._refused.pop(peer, None)

    def named(self) -> frozenset[str]:
        """Everybody that something is kept of."""
        return frozenset(self._known) | frozenset(self._refused)


@dataclass
class _Connection:
    """A socket of this process; port 0 where it is no accepted TCP connection."""

    inode: int
    since: float
    port: int = 0
    host: str = ""
    peer: str = ""
    received: int = 0


class Doors:
    """The listening ports of this process. Use the one that this module has, `DOORS`."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[[], Collection[str]]] = {}
        self._callers: dict[int, Callers] = {}
        self._connections: dict[int, _Connection] = {}
        self._lock = threading.Lock()

    def watch(self, port: int, known: Callable[[], Collection[str]], callers: Callers | None = None) -> None:
        """Watches the connections to a port; `known` are the peers whose connections stay."""
        with self._lock:
            idle = not self._known
            self._known[port] = known
            if callers is not None:
                self._callers[port] = callers
            if idle and _OWN.is_dir():
                threading.Thread(target=self._run, name="doors", daemon=True).start()

    def leave(self, port: int) -> None:
        """Watches it no longer."""
        with self._lock:
            self._known.pop(port, None)
            self._callers.pop(port, None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._known:
                    return
                busy = self._look(time.monotonic())
            time.sleep(BUSY_LOOK_S if busy else LOOK_S)

    def _look(self, now: float) -> bool:
        """Ends expired connections; returns whether there are enough strangers to look again soon."""
        named = {port: callers.named() for port, callers in self._callers.items()}
        known = {port: look() for port, look in self._known.items()}
        self._connections = dict(self._found(now))
        here: dict[int, set[str]] = {port: set() for port in self._known}
        strangers: dict[int, list[tuple[int, _Connection]]] = {port: [] for port in self._known}
        for descriptor, each in self._connections.items():
            if each.port in here:
                here[each.port].add(each.peer)
                if each.peer not in known[each.port]:
                    strangers[each.port].append((descriptor, each))
        for port, callers in self._callers.items():
            # Of those alone that were named before the sockets were listed: others have come since.
            callers.forget(named[port] - here[port])
        return sum(self._end(port, found, now) for port, found in strangers.items()) > 0

    def _end(self, port: int, strangers: list[tuple[int, _Connection]], now: float) -> bool:
        callers = self._callers.get(port)
        tiresome = set(callers.tiresome()) if callers is not None else set()
        of_peer = Counter[str]()
        newest_first = sorted(strangers, key=lambda found: -found[1].since)
        for in_all, (descriptor, each) in enumerate(newest_first, 1):
            of_peer[each.host] += 1
            many = in_all > IN_ALL * for_callers() or of_peer[each.host] > OF_PEER * for_callers()
            if many or each.peer in tiresome or self._late(descriptor, each, now):
                _shut(descriptor, each)
        return len(strangers) > MANY

    def _late(self, descriptor: int, each: _Connection, now: float) -> bool:
        if now - each.since < STRANGER_S:
            return False
        before, each.received = each.received, _received(descriptor)
        return now - each.since > SENDING_S or each.received - before < SENDING_BYTES

    def _found(self, now: float) -> Iterator[tuple[int, _Connection]]:
        """Every socket of this process by its descriptor; what was seen before is not asked for again."""
        for name in os.listdir(_OWN):
            descriptor = int(name)
            try:
                status = os.fstat(descriptor)
            except OSError:  # It was closed meanwhile.
                continue
            if stat.S_ISSOCK(status.st_mode):
                before = self._connections.get(descriptor)
                same = before is not None and before.inode == status.st_ino
                yield descriptor, before if before and same else _described(descriptor, status.st_ino, now)


def _described(descriptor: int, inode: int, now: float) -> _Connection:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6):
            host, port = found.getpeername()[:2]
            return _Connection(inode, now, found.getsockname()[1], host, peer_name(host, port))
    return _Connection(inode, now)


def _shut(descriptor: int, expected: _Connection) -> None:
    """Ends a connection, unless the descriptor has become another's: looked at and shut through one duplicate."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if os.fstat(found.fileno()).st_ino == expected.inode:
            found.shutdown(socket.SHUT_RDWR)


def _received(descriptor: int) -> int:
    """Bytes that have come by a connection; 0 where the system does not say."""
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(descriptor)) as found:
        said = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        return int(_RECEIVED.unpack_from(said, _RECEIVED_AT)[0])
    return 0


DOORS = Doors()
