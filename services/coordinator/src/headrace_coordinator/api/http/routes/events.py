"""Events of a run as a stream (WHATWG HTML, section 9.2): ids to go on from, comments while nothing happens."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from headrace_schema.resources.views import EventView
from pydantic import Field

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.http.requests import known_parameters
from headrace_coordinator.api.refusal import Refused

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

log = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream"
RETRY_MS = 1000
MAX_STREAMS, MAX_OF_CLIENT = 256, 64
NOT_COUNTED: AbstractContextManager[None] = nullcontext()
# No line ends to the standard, but to clients that split text as Python does (httpx). In JSON: in strings.
LINE_SEPARATORS = {point: f"\\u{point:04x}" for point in (0x85, 0x2028, 0x2029)}
MAX_EVENT_ID = 2**63 - 1
EventId = Annotated[int, Field(ge=0, le=MAX_EVENT_ID)]
EVENT_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": EventView,
        "description": "Server-sent events; each one's data is an EventView, its id the place to go on from.",
        "content": {MEDIA_TYPE: {}},
    }
}


def event_routes(coordinator: Coordinator, heartbeat_s: float) -> APIRouter:
    """The route of a run's events."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[Depends(known_parameters)])
    streams = Streams(heartbeat_s)

    @routes.get("/{run_id}/events", response_class=StreamingResponse, responses=EVENT_ANSWER)
    async def stream_events(
        request: Request,
        run_id: str,
        after: Annotated[EventId, Query(description="only events with a higher id")] = 0,
        follow: Annotated[bool, Query(description="false: end with the events that there are")] = True,
        last_event_id: Annotated[EventId | None, Header(description="as `after`; takes precedence")] = None,
    ) -> Response:
        """Events of a run as they happen, until it has ended."""
        run = coordinator.reads.run(run_id)
        behind = after if last_event_id is None else last_event_id
        events = coordinator.past.events(run.id, behind, follow=follow)
        parts = streams.start(events, _client(request), coordinator.quotas.stream(CALLER.get()))
        return StreamingResponse(parts, 200, HEADERS, MEDIA_TYPE)

    return routes


class Streams:
    """The open streams of an app, bounded so that idle clients cannot pile up."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._open: Counter[str] = Counter()

    def start(
        self,
        events: AsyncIterator[EventView],
        client: str = "",
        counted: AbstractContextManager[None] = NOT_COUNTED,
    ) -> AsyncIterator[bytes]:
        """A stream of these events; UNAVAILABLE when too many are open, in all or of this client.

        `counted` is entered while it is open.
        """
        for most, count in ((MAX_STREAMS, self._open.total()), (MAX_OF_CLIENT, self._open[client])):
            if count >= most:
                raise Refused("UNAVAILABLE", f"{most} streams of events are open; close one, or try again")
        return self._counted(events, client, counted)

    async def _counted(
        self, events: AsyncIterator[EventView], client: str, counted: AbstractContextManager[None]
    ) -> AsyncIterator[bytes]:
        self._open[client] += 1
        try:
            with counted:
                async with aclosing(stream(events, self._heartbeat_s)) as parts:
                    async for part in parts:
                        yield part
        finally:
            self._open[client] -= 1
            self._open += Counter()  # without clients that have none


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


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
