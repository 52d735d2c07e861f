"""The runs that an instance has open: one opening at a time per run, repeated, replaced, refused, reported.

Knows no gRPC and no service; the simulation's imaginary instances use the same class.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.common.v1 import common_pb2

_REMEMBERED_CLOSINGS = 256
Build = Callable[[], Awaitable[Any]]
End = Callable[[], Awaitable[None]]


class OpenPhase(Enum):
    """How far an opening is."""

    OPENING = common_pb2.OPEN_PHASE_OPENING
    OPEN = common_pb2.OPEN_PHASE_OPEN
    CLOSING = common_pb2.OPEN_PHASE_CLOSING


class OpeningRefused(Exception):
    """A command that does not fit what is open. `reason` is BUSY, CONFLICT, OPENING_STALE or NOT_OPEN."""

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = metadata


@dataclass(eq=False)
class Opening:
    """One opening of a run. `work` builds or closes it; `on_close` ends the streams that serve it."""

    run: str
    open_id: int
    config: object
    end: End
    phase: OpenPhase = OpenPhase.OPENING
    last_command: int = 0
    work: asyncio.Task[Any] | None = None
    built: Any = None
    on_close: list[Callable[[], None]] = field(default_factory=list)


class OpenRuns:
    """A table run -> opening. At most `limit` runs are open at once; 0 means no limit.

    A command with open_id 0 means whatever opening the run has. `on_change` is called after every change of
    the table. Commands are CommandHeaders; all methods must run on one event loop.
    """

    def __init__(self, limit: int = 0, on_change: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.on_change = on_change
        self._openings: dict[str, Opening] = {}
        # Highest open_id closed per run: a delayed copy of its OpenRun must not open it again.
        self._closed: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, run: object) -> bool:
        return run in self._openings

    def names(self) -> list[str]:
        """Names of the runs in the table."""
        return sorted(self._openings)

    def reports(self) -> list[common_pb2.OpenRunReport]:
        """What Register and each heartbeat say."""
        return [
            common_pb2.OpenRunReport(
                run=opening.run,
                open_id=opening.open_id,
                phase=opening.phase.value,
                last_command=opening.last_command,
            )
            for opening in self._openings.values()
        ]

    async def open(self, header: common_pb2.CommandHeader, config: object, build: Build, end: End) -> Any:
        """Opens a run and returns what `build` returns; a repetition returns the first result.

        `end` undoes the opening; it runs also when `build` was cancelled. An older opening of the same run is
        closed first. When the caller is cancelled, the opening goes on. A run that fails to open is not open.

        Raises:
            OpeningRefused: OPENING_STALE, CONFLICT (same opening, other config) or BUSY (limit reached).
        """
        while True:
            opening = self._openings.get(header.run)
            if opening is None:
                if (closing := self._check_room(header)) is None:
                    break
                await _settled(closing)
            elif opening.phase is OpenPhase.CLOSING:
                await _settled(opening)
            elif header.open_id in (0, opening.open_id):
                return await self._repeat(opening, config)
            elif header.open_id < opening.open_id:
                raise _stale(header, f"opening {opening.open_id} of it is open here")
            else:
                await self._close(opening)
        opening = Opening(header.run, header.open_id, config, end)
        self._openings[header.run] = opening
        opening.work = _task(self._build(opening, build), f"open {header.run}")
        self.on_change()
        return await self._result(opening)

    async def close(self, header: common_pb2.CommandHeader) -> None:
        """Closes a run, also while it is being opened. A run that is not open, or open anew, is left as it is."""
        opening = self._openings.get(header.run)
        if opening is not None and header.open_id and header.open_id < opening.open_id:
            return
        if opening is not None:
            await self._close(opening)
        self._remember_closed(header.run, header.open_id)

    async def close_all(self) -> None:
        """Closes every run."""
        for opening in list(self._openings.values()):
            await self._close(opening)

    def check(self, header: common_pb2.CommandHeader) -> None:
        """Raises OpeningRefused OPENING_STALE for a command to another opening, NOT_OPEN while it is closing."""
        opening = self._openings.get(header.run)
        if header.run and header.open_id and (opening is None or opening.open_id != header.open_id):
            open_here = f"opening {opening.open_id} of it is" if opening else "no opening of it is"
            raise _stale(header, f"{open_here} open here")
        if opening is not None and opening.phase is OpenPhase.CLOSING:
            raise OpeningRefused("NOT_OPEN", f"{header.run} is being closed here")

    def applied(self, header: common_pb2.CommandHeader) -> None:
        """Notes that a command was carried out."""
        opening = self._openings.get(header.run)
        if opening is not None and header.open_id in (0, opening.open_id):
            opening.last_command = max(opening.last_command, header.command_sequence)

    @contextmanager
    def until_closed(self, run: str, on_close: Callable[[], None]) -> Iterator[None]:
        """Calls `on_close` when the run's closing begins while the body runs. A stream ends itself by it."""
        opening = self._openings.get(run)
        if opening is None:
            yield
            return
        opening.on_close.append(on_close)
        try:
            yield
        finally:
            opening.on_close.remove(on_close)

    def _check_room(self, header: common_pb2.CommandHeader) -> Opening | None:
        """None when the run may be opened; an opening that is being closed and may make room."""
        if header.open_id and header.open_id <= self._closed.get(header.run, 0):
            raise _stale(header, f"opening {self._closed[header.run]} of it was closed here")
        if not self.limit or len(self._openings) < self.limit:
            return None
        for opening in self._openings.values():
            if opening.phase is OpenPhase.CLOSING:
                return opening
        names = ", ".join(self.names())
        raise OpeningRefused("BUSY", f"{names} is open here; close it before {header.run}", open_run=names)

    async def _repeat(self, opening: Opening, config: object) -> Any:
        if opening.config != config:
            raise OpeningRefused(
                "CONFLICT", f"{opening.run} is open with another config; close it first, or use a new open_id"
            )
        return await self._result(opening)

    async def _result(self, opening: Opening) -> Any:
        if opening.phase is OpenPhase.OPENING and opening.work is not None:
            work = opening.work
            await asyncio.wait({work})
            if work.cancelled():
                raise OpeningRefused("OPENING_STALE", f"{opening.run} was closed while it was being opened")
            return work.result()
        return opening.built

    async def _build(self, opening: Opening, build: Build) -> Any:
        try:
            opening.built = await build()
        except BaseException:  # cancelled by its closing too: what was not built is not reported
            if opening.phase is OpenPhase.OPENING:  # Else its closing takes it off the table.
                self._forget(opening)
            raise
        if opening.phase is OpenPhase.OPENING:
            opening.phase = OpenPhase.OPEN
            self.on_change()
        return opening.built

    async def _close(self, opening: Opening) -> None:
        """Closes the run, or waits where that has begun. A closing goes on when its caller is cancelled."""
        if opening.phase is not OpenPhase.CLOSING:
            building, opening.phase = opening.work, OpenPhase.CLOSING
            opening.work = _task(self._end(opening, building), f"close {opening.run}")
            self.on_change()
        assert opening.work is not None
        await asyncio.shield(opening.work)

    async def _end(self, opening: Opening, building: asyncio.Task[Any] | None) -> None:
        if building is not None and not building.done():
            building.cancel()
            await asyncio.wait({building})
        for end_stream in list(opening.on_close):
            end_stream()
        try:
            await opening.end()
        except BaseException:
            opening.phase = OpenPhase.OPEN  # What is left of it stays reported, so that it is closed again.
            self.on_change()
            raise
        self._forget(opening)

    def _forget(self, opening: Opening) -> None:
        del self._openings[opening.run]
        self.on_change()

    def _remember_closed(self, run: str, open_id: int) -> None:
        if open_id:
            self._closed[run] = max(open_id, self._closed.pop(run, 0))
            while len(self._closed) > _REMEMBERED_CLOSINGS:
                self._closed.popitem(last=False)


def _task(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    task = asyncio.create_task(work, name=name)
    # The caller that waited for it may be gone: then nobody reports its error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _settled(opening: Opening) -> None:
    """Waits for a closing, however it ends."""
    assert opening.work is not None
    await asyncio.wait({opening.work})


def _stale(header: common_pb2.CommandHeader, found: str) -> OpeningRefused:
    return OpeningRefused(
        "OPENING_STALE", f"the command is for opening {header.open_id} of {header.run}, and {found}"
    )
