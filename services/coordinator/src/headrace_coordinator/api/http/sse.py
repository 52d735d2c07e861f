"""Events as a stream (WHATWG HTML, section 9.2): ids to go on from, comments while nothing happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from headrace_schema.resources.views import EventView

from headrace_coordinator.api.control import Refused

log = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"
RETRY_MS = 1000
MAX_STREAMS = 256
# No line ends to the standard, but to clients that split text as Python does (httpx). In JSON: in strings.
LINE_SEPARATORS = {point: f"\\u{point:04x}" for point in (0x85, 0x2028, 0x2029)}


class Streams:
    """The open streams of an app, bounded so that idle clients cannot pile up."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._open = 0

    def start(self, events: AsyncIterator[EventView]) -> AsyncIterator[bytes]:
        """A stream of these events; UNAVAILABLE when too many are open."""
        if self._open >= MAX_STREAMS:
            raise Refused("UNAVAILABLE", f"{MAX_STREAMS} streams of events are open; close one, or try again")
        return self._counted(events)

    async def _counted(self, events: AsyncIterator[EventView]) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            async with aclosing(stream(events, self._heartbeat_s)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._open -= 1


async def stream(events: AsyncIterator[EventView], heartbeat_s: float) -> AsyncGenerator[bytes, None]:
    """Events as bytes, with a comment after every `heartbeat_s` of silence; ends when `events` does."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    source = aiter(events)
    waiting = asyncio.ensure_future(_next(source))
    try:
        while True:
            await asyncio.wait({waiting}, timeout=heartbeat_s)
            if not waiting.done():
                yield b": alive\n\n"
                continue
            event = waiting.result()
            if event is None:
                return
            data = event.model_dump_json().translate(LINE_SEPARATORS)
            yield f"id: {event.id}\nevent: {event.type}\ndata: {data}\n\n".encode()
            waiting = asyncio.ensure_future(_next(source))
    except Refused as refusal:
        log.warning("a stream of events ends: %s", refusal.message)  # The client comes again and is told.
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _next(source: AsyncIterator[EventView]) -> EventView | None:
    return await anext(source, None)
