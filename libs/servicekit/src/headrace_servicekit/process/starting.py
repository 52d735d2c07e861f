"""A bound on how many processes start at once. A start is over when the process listens or ends, or after 60 s."""

from __future__ import annotations

import asyncio
import socket

import psutil

from headrace_servicekit.logs import get_logger

START_S = 60.0
"""After so long a process that does not listen no longer keeps others from starting."""
_POLL_S = 0.25
_logger = get_logger(__name__)


class Start:
    """One process on its way up; it holds a place until `end`."""

    def __init__(self, places: asyncio.Semaphore, name: str) -> None:
        self.over = False
        self._places = places
        self._name = name
        self._watch: asyncio.Task[None] | None = None

    def watch(self, pid: int) -> None:
        """Ends the start once the process listens."""
        self._watch = asyncio.create_task(self._until_listening(pid), name=f"start of {self._name}")

    def end(self) -> None:
        """Gives the place to the next process; repeated calls do nothing."""
        if self._watch is not None:
            self._watch.cancel()
        if not self.over:
            self.over = True
            self._places.release()

    async def _until_listening(self, pid: int) -> None:
        deadline = asyncio.get_running_loop().time() + START_S
        while not _listens(pid):
            if asyncio.get_running_loop().time() > deadline:
                waited = {"supervised": self._name, "waited_s": START_S}
                _logger.warning("does not listen yet; the next process starts", extra=waited)
                break
            await asyncio.sleep(_POLL_S)
        self._watch = None
        self.end()


class StartGate:
    """`places` processes may start at once."""

    def __init__(self, places: int) -> None:
        self._places = asyncio.Semaphore(places)

    async def enter(self, name: str, stopping: asyncio.Event) -> Start | None:
        """Waits for a place, in the order of the calls; None when `stopping` is set first."""
        place = asyncio.ensure_future(self._places.acquire())
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({place, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            place.cancel()
        if not stopping.is_set():
            return Start(self._places, name)
        if not place.cancelled() and place.done():
            self._places.release()
        return None


def _listens(pid: int) -> bool:
    """Whether a process listens: instances do on TCP before they register, the store on a named socket."""
    try:
        connections = psutil.Process(pid).net_connections("all")
    except psutil.Error:
        return False
    return any(
        connection.status == psutil.CONN_LISTEN or (connection.family == socket.AF_UNIX and connection.laddr)
        for connection in connections
    )
