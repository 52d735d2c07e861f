"""Whether the other ranks of a trainer group live, heard by a thread beside the compute. Knows no torch and no round.

Rank 0 listens, every other rank keeps one connection to it, and each side sends a byte a second. A long forward pass
or a debugger at a breakpoint does not silence this thread; SIGSTOP does, and SIGKILL closes the connection at once.
"""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from headrace_servicekit.rpc.addresses import listening

BEAT_S = 1.0
SILENT_S = 10.0
"""A rank that is not heard for so long counts as lost: ten beats, so that a busy machine does not lose one."""
UNKNOWN_S, MOST_UNKNOWN = 2.0, 64
"""How long a connection may take to show the secret, and how many may be about it."""
SECRET_BYTES = 16
_HELLO_BYTES = SECRET_BYTES + 4
_ALIVE, _LEFT, _LOST, _FULL = b".", b"q", b"x", b"m"
"""What is sent: it lives; it leaves in order; it has ended the group, for whichever rank is lost, or because a device
has no memory left."""
NO_MEMORY = "ran out of device memory"
"""In the sentence about a group that ended so."""
Lost = Callable[[tuple[int, ...], str], None]
"""Called once, on the liveness thread, with the ranks that are lost and a sentence."""


@dataclass
class _Peer:
    rank: int
    heard_at: float


class Liveness:
    """One rank's side. Rank 0 calls `listen`, tells the others the address and the secret, and all call `watch`."""

    def __init__(self, rank: int, world_size: int, *, silent_s: float = SILENT_S) -> None:
        self._rank, self._world_size = rank, world_size
        self._silent_s = silent_s
        self._beat_s = min(BEAT_S, silent_s / 5) if math.isfinite(silent_s) else BEAT_S
        self._listener: socket.socket | None = None
        self._secret = b""
        self._peers: dict[socket.socket, _Peer] = {}
        self._absent: set[int] = set()
        self._unknown: dict[socket.socket, tuple[float, bytes]] = {}
        """Connections that have not shown the secret: since when, and what of it has come."""
        self._closing: bytes = b""
        self._thread: threading.Thread | None = None
        self._on_lost: Lost = lambda _ranks, _reason: None

    def listen(self, host: str = "127.0.0.1", secret: bytes = b"") -> tuple[int, bytes]:
        """Port and secret by which the other ranks find rank 0, which listens at `host`. Raises OSError."""
        self._listener = listening(host, 0)
        self._listener.setblocking(False)
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        port: int = self._listener.getsockname()[1]
        return port, self._secret

    def watch(self, host: str, port: int, secret: bytes, on_lost: Lost) -> None:
        """Begins to listen to the others; `host`, `port` and `secret` are rank 0's. Raises OSError when it is gone."""
        self._on_lost = on_lost
        if self._rank:
            connection = socket.create_connection((host, port), timeout=max(1.0, min(self._silent_s, 10.0)))
            connection.sendall(secret + self._rank.to_bytes(4, "big"))
            connection.setblocking(False)
            self._peers[connection] = _Peer(0, time.monotonic())
        else:
            self._absent = set(range(1, self._world_size))
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def close(self, *, in_order: bool = True, no_memory: bool = False) -> None:
        """Ends the thread and the connections; the others take it for a loss unless it is `in_order`, and hear why
        where this rank's device has no memory left.
        """
        self._closing = self._closing or (_FULL if no_memory else _LEFT if in_order else _LOST)
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        lost: tuple[tuple[int, ...], str] | None = None
        with selectors.DefaultSelector() as selector:
            for connection in (self._listener, *self._peers):
                if connection is not None:
                    selector.register(connection, selectors.EVENT_READ)
            began = looked_at = beaten_at = time.monotonic()
            while not self._closing and lost is None:
                ready = {key.fileobj for key, _ in selector.select(self._beat_s / 4)}
                now = time.monotonic()
                if now - looked_at > self._silent_s / 2:  # This process stood still: no silence counts.
                    began = now
                    for peer in self._peers.values():
                        peer.heard_at = now
                looked_at = now
                if self._listener in ready:
                    self._accept(selector, now)
                for connection in [each for each in self._unknown if each in ready]:
                    self._admit(connection, selector, now)
                self._end_unknown(selector, now)
                lost = self._hear(selector, ready, now) or self._silent(now, began)
                if now - beaten_at >= self._beat_s:
                    beaten_at = now
                    self._send(_ALIVE)
        if lost is not None and not self._closing:
            self._closing = (
                _FULL if NO_MEMORY in lost[1] else _LOST
            )  # rank 0 tells the others what one told it
            self._end()
            self._on_lost(*lost)
        else:
            self._end()

    def _accept(self, selector: selectors.BaseSelector, now: float) -> None:
        """Somebody connects: a rank, or a stranger, for whom this thread never waits."""
        assert self._listener is not None
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._unknown[connection] = now, b""
            selector.register(connection, selectors.EVENT_READ)

    def _admit(self, connection: socket.socket, selector: selectors.BaseSelector, now: float) -> None:
        """Reads a hello. One that does not know the secret is of no rank."""
        since, hello = self._unknown[connection]
        try:
            came = connection.recv(_HELLO_BYTES - len(hello))
        except BlockingIOError:
            return
        except OSError:
            came = b""
        hello += came
        self._unknown[connection] = (since if came else now - 2 * UNKNOWN_S), hello
        if len(hello) < _HELLO_BYTES:
            return
        rank = int.from_bytes(hello[SECRET_BYTES:], "big")
        if secrets.compare_digest(hello[:SECRET_BYTES], self._secret) and rank in self._absent:
            del self._unknown[connection]
            self._absent.discard(rank)
            self._peers[connection] = _Peer(rank, now)
        else:
            self._unknown[connection] = now - 2 * UNKNOWN_S, b""

    def _end_unknown(self, selector: selectors.BaseSelector, now: float) -> None:
        """Those that take too long, and the oldest of too many."""
        for connection, (since, _) in list(self._unknown.items()):
            if now - since > UNKNOWN_S or len(self._unknown) > MOST_UNKNOWN:
                del self._unknown[connection]
                selector.unregister(connection)
                connection.close()

    def _hear(
        self, selector: selectors.BaseSelector, ready: Collection[object], now: float
    ) -> tuple[tuple[int, ...], str] | None:
        """Reads what came; the ranks that are lost by it, with a sentence."""
        for connection in [each for each in self._peers if each in ready]:
            peer = self._peers[connection]
            try:
                said = connection.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            if _LEFT in said:
                selector.unregister(connection)
                connection.close()
                del self._peers[connection]
                continue
            if _FULL in said:
                # Rank 0 may pass on what another rank has said.
                return (), f"{f'rank {peer.rank}' if peer.rank else 'a rank'} {NO_MEMORY}"
            if _LOST in said:
                return (), f"rank {peer.rank} has ended the group"
            if not said:
                return (peer.rank,), f"rank {peer.rank} has closed its connections"
            peer.heard_at = now
        return None

    def _silent(self, now: float, began: float) -> tuple[tuple[int, ...], str] | None:
        silent = {peer.rank for peer in self._peers.values() if now - peer.heard_at > self._silent_s}
        if now - began > self._silent_s:
            silent |= self._absent
        if not silent:
            return None
        named = ", ".join(map(str, sorted(silent)))
        return tuple(sorted(silent)), f"rank {named} has been silent for {self._silent_s:g} s"

    def _send(self, what: bytes) -> None:
        for connection in self._peers:
            with suppress(
                OSError
            ):  # A broken one is found where it is read; a full one belongs to a silent rank.
                connection.send(what)

    def _end(self) -> None:
        self._send(self._closing)
        for connection in (self._listener, *self._peers, *self._unknown):
            if connection is not None:
                connection.close()
        self._listener, self._peers, self._unknown = None, {}, {}
