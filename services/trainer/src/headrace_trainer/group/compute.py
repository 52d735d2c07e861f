"""The one thread that computes, for a gRPC service: refusals come back as ServiceErrors. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from headrace_servicekit.rpc.errors import ServiceError

from headrace_trainer.errors import Kind, Refusal

Result = TypeVar("Result")

_CODES: dict[Kind, grpc.StatusCode] = {
    "precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "conflict": grpc.StatusCode.ALREADY_EXISTS,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.ABORTED,
}


@contextmanager
def refusals() -> Iterator[None]:
    """Turns a Refusal into the ServiceError that the interceptor sends."""
    try:
        yield
    except Refusal as refusal:
        code = _CODES[refusal.kind]
        raise ServiceError(code, refusal.reason, refusal.message, **refusal.metadata) from refusal


class ComputeThread:
    """Runs one function at a time, in order: torch's threads are the lease's, and rounds must not overlap."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The function's result, after what was asked for before. Raises ServiceError for a Refusal."""
        with refusals():
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Ends the thread after what was asked for."""
        self._pool.shutdown()


async def elsewhere(function: Callable[..., Result], *arguments: Any) -> Result:
    """Runs on some other thread: waits and disk reads that must not hold up the compute thread."""
    with refusals():
        return await asyncio.to_thread(function, *arguments)
