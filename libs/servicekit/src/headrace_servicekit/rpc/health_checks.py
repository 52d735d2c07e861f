"""Health checks, which need no token: answered beside the work of a server, and never kept waiting for by it.

A check without a body would wait for ever: it gets a moment, and when many wait the oldest is refused. Knows no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import decoded, tolerant

CHECK = "/grpc.health.v1.Health/Check"
BODY_S = 2.0
OF_PEER, IN_ALL = 16, 64
"""Checks that wait for their bodies at the same time."""


class HealthChecks:
    """The checks of one server that are being read."""

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
