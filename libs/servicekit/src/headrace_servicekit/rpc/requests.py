"""What a server reads from the wire before its handlers see it: bytes that are no message of the contract become a
refusal, where gRPC would answer UNKNOWN and log a traceback.

Also checks of single fields that several services share. Knows no service.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from pydantic_core import from_json

from headrace_servicekit.rpc.errors import ServiceError

MAX_NAME_CHARACTERS = 256
MAX_ATTEMPT = 1 << 20
MAX_NUMBER = 1 << 53
"""Highest version, step or ordinal. They only rise, so one far above the others would end a run's numbering."""
HIGHEST_EPOCH = (1 << 30) - 1
"""Highest epoch of a coordinator: opening ids and command sequences have 64 bits, the epoch above 32 others."""
HIGHEST_COMMAND = (HIGHEST_EPOCH << 32) + (1 << 32) - 1
_UNSPEAKABLE = re.compile(r"[\x00-\x1f\x7f]")


class Undecodable:
    """Stands for a request whose bytes do not decode."""

    def __init__(self, size: int, why: str) -> None:
        self._size = size
        self._why = why

    def refusal(self, method: str) -> ServiceError:
        """The INVALID_ARGUMENT that its sender gets."""
        return ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNDECODABLE",
            f"the request of {self._size} bytes is not {method}'s request message ({self._why}); use the "
            "headrace-proto of this release, and UTF-8 in every string",
        )


def tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns an Undecodable where the given one raises."""
    if deserializer is None:
        return None
    decode = deserializer

    def read(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return Undecodable(len(data), str(error))

    return read


class Decoded:
    """The requests of a stream; raises ServiceError UNDECODABLE at one that does not decode."""

    def __init__(self, requests: Any, method: str) -> None:
        self._requests = requests
        self._method = method

    def __aiter__(self) -> Decoded:
        """Itself."""
        return self

    async def __anext__(self) -> Any:
        """The next request."""
        # Only now: gRPC warns of an iterator that was asked for and never read.
        return decoded(await anext(aiter(self._requests)), self._method)


def decoded(request: Any, method: str) -> Any:
    """The request. Raises ServiceError UNDECODABLE."""
    if isinstance(request, Undecodable):
        raise request.refusal(method)
    return request


class Admission:
    """Coordinator epochs that the command of one call carries, to be believed once the call is accepted."""

    def __init__(self) -> None:
        self._offered: list[tuple[Callable[[int], None], int]] = []

    def offer(self, believe: Callable[[int], None], coordinator_epoch: int) -> None:
        """Notes an epoch, and who believes it then."""
        self._offered.append((believe, coordinator_epoch))

    def accept(self) -> None:
        """The call has done what it was asked, or begun to answer: its epochs are believed."""
        for believe, coordinator_epoch in self._offered:
            believe(coordinator_epoch)
        self._offered.clear()


_admission: ContextVar[Admission | None] = ContextVar("admission", default=None)


@contextmanager
def admission() -> Iterator[Admission]:
    """Holds back the epochs of the commands that are checked in the body, until `accept`."""
    mine = Admission()
    _admission.set(mine)
    try:
        yield mine
    finally:
        _admission.set(None)  # Not reset: an abandoned stream is closed in another context.


def call_of_now() -> Admission | None:
    """The admission of the call around this; None outside a call."""
    return _admission.get()


def accept() -> None:
    """The call around this has begun to answer, by another way than gRPC's."""
    if call := call_of_now():
        call.accept()


def invalid(field: str, problem: str) -> ServiceError:
    """The refusal of one field; `problem` says what is wrong and what is allowed."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", f"{field}: {problem}", key=field)


def check_name(field: str, value: str, *, optional: bool = False) -> str:
    """A name or id for logs, keys and pages. Raises INVALID when it is empty, too long or holds control characters."""
    if not value and not optional:
        raise invalid(field, "is missing")
    if len(value) > MAX_NAME_CHARACTERS:
        raise invalid(field, f"{len(value)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    if _UNSPEAKABLE.search(value):
        raise invalid(field, f"{value!r} holds a control character")
    return value


def check_at_least(field: str, value: float, least: int) -> None:
    """Raises INVALID for a number below `least`."""
    if not value >= least:
        raise invalid(field, f"{value} is below {least}")


def check_number(field: str, value: int, least: int = 0, most: int = MAX_NUMBER) -> None:
    """A counter or ordinal: raises INVALID below `least` or above `most`."""
    check_at_least(field, value, least)
    if value > most:
        raise invalid(field, f"{value} is above {most}")


def check_enum(field: str, enum: Any, value: int) -> None:
    """Raises INVALID for a number that the contract's `enum` (its Python wrapper) does not have."""
    if value not in enum.DESCRIPTOR.values_by_number:
        raise invalid(field, f"{value} is no value of {enum.DESCRIPTOR.name}")


def check_seconds(field: str, duration: Any) -> float:
    """Seconds of a google.protobuf.Duration, 0 or more. Raises INVALID for a negative or impossible one."""
    try:
        seconds = float(duration.ToNanoseconds()) / 1e9
        duration.ToJsonString()  # checks ranges and signs
    except ValueError as error:
        raise invalid(field, str(error)) from error
    if seconds < 0:
        raise invalid(field, f"{seconds:g} s; give 0 or more")
    return seconds


def check_page(page_size: int, page_token: str) -> int:
    """Position that a page token of a fixed list names, 0 for none. Raises INVALID."""
    check_at_least("page_size", page_size, 0)
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdecimal() and len(page_token) < 10):
        raise invalid(
            "page_token", f"{page_token[:40]!r} is no token; use next_page_token of the page before"
        )
    return int(page_token)


def json_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in a text field, {} for an empty one. Raises INVALID, also for nesting beyond 200 levels."""
    if not text:
        return {}
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(field, f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise invalid(field, "give a JSON object")
    return found


CHECK = "/grpc.health.v1.Health/Check"
BODY_S = 2.0
OF_PEER, IN_ALL = 16, 64
"""Checks that wait for their bodies at the same time."""


class HealthChecks:
    """The health checks of one server that are being read: they need no token, and are never kept waiting by its work.

    One without a body would wait for ever: it gets a moment, and when many wait the oldest is refused.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[Any], str] = {}

    def answering(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of Check within its allowance. It has the shape of a stream, which begins before the body."""

        async def check(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            try:
                request = decoded(await self._body(requests, context.peer()), CHECK)
            except ServiceError as error:
                await context.abort(error.code, error.message, error.trailing_metadata())
            yield await handler.unary_unary(request, context)  # type: ignore[misc]  # of grpc.aio: a coroutine

        return grpc.stream_stream_rpc_method_handler(
            check,  # type: ignore[arg-type]
            tolerant(handler.request_deserializer),
            handler.response_serializer,
        )

    async def _body(self, requests: AsyncIterator[Any], peer: str) -> Any:
        host = peer.rpartition(":")[0]
        self._make_room(host)
        reading = asyncio.ensure_future(anext(aiter(requests)))  # type: ignore[arg-type]
        self._waiting[reading] = host
        try:
            done, _ = await asyncio.wait({reading}, timeout=BODY_S)
            if done and not reading.cancelled():
                return reading.result()
        except StopAsyncIteration:
            pass
        finally:
            reading.cancel()
            del self._waiting[reading]
        message = "the health check's request did not come with it; send it at once"
        raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_BODY", message)

    def _make_room(self, host: str) -> None:
        own = [reading for reading, other in self._waiting.items() if other == host]
        if len(own) >= OF_PEER:
            own[0].cancel()
        elif len(self._waiting) >= IN_ALL:
            next(iter(self._waiting)).cancel()
