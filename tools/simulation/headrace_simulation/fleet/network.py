"""Calls between the coordinator and simulated instances: delay, duplication, lost replies, partitions, death."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from headrace_coordinator.fleet.instance_client import CallRefused, InstanceClient, InstanceDown
from typing_extensions import override

QUIESCED_RETRY_S = 0.2
KEEPALIVE_S = 20.0
"""After so long a silent peer counts as unreachable."""


class ReachableInstance(Protocol):
    """A simulated instance as the network sees it."""

    incarnation: str
    alive: bool
    cut_off: bool

    async def handle(self, method: str, request: Any) -> Any:
        """Answers a unary call."""

    def handle_stream(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Answers a stream."""


class SentRequests:
    """A stream's requests on their way, read in a task of their own as gRPC does.

    That task learns of a broken stream only once it has the next request, which is lost.
    """

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self.broken = False
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._write(requests))

    async def _write(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            if self.broken:
                return
            self._sent.put_nowait(request)
        self._sent.put_nowait(None)

    def check(self) -> None:
        """Raises what the sender raised, as `headrace_servicekit.rpc.client` does."""
        if self.task.done() and not self.task.cancelled():
            self.task.result()

    async def read(self) -> AsyncIterator[Any]:
        """The instance's side."""
        while (request := await self._sent.get()) is not None:
            yield request


class SimulatedInstanceClient(InstanceClient):
    """Calls one imaginary instance. Any call may be delivered twice, or executed and its reply lost."""

    def __init__(
        self,
        instance: ReachableInstance,
        rng: random.Random,
        faulty: bool,
        heard: Callable[[str, Any], None] = lambda method, request: None,
    ) -> None:
        self._instance = instance
        self._rng = rng
        self._faulty = faulty
        self._heard = heard
        self.calls: Counter[str] = Counter()

    async def _travel(self, timeout: float) -> None:
        await asyncio.sleep(self._rng.uniform(0.0005, 0.02))
        if not self._instance.alive:
            raise InstanceDown(self._instance.incarnation, "connection refused")
        if self._instance.cut_off:
            await asyncio.sleep(min(timeout, KEEPALIVE_S))
            raise InstanceDown(self._instance.incarnation, "deadline exceeded")

    def _happens(self, probability: float) -> bool:
        return self._faulty and self._rng.random() < probability

    @override
    async def call(self, method: str, request: Any, timeout: float) -> Any:
        self.calls[method] += 1
        self._heard(method, request)
        await self._travel(timeout)
        answer = await self._patiently(method, request, timeout)
        if self._happens(0.02):
            again = await self._handle(method, request)
            assert type(again) is type(answer)
        if self._happens(0.01):
            raise InstanceDown(self._instance.incarnation, f"{method}: the reply was lost")
        if method == "OpenRun" and self._happens(0.03):
            await asyncio.sleep(self._rng.uniform(1.0, 60.0))
        await self._travel(timeout)
        return answer

    async def _patiently(self, method: str, request: Any, timeout: float) -> Any:
        """Repeats a call that is refused because its lease was not renewed in time, as the gRPC client does."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                return await self._handle(method, request)
            except CallRefused as refused:
                left = deadline - asyncio.get_running_loop().time()
                if refused.reason != "LEASE_QUIESCED" or left < QUIESCED_RETRY_S:
                    raise
            await self._travel(left)
            await asyncio.sleep(QUIESCED_RETRY_S)

    async def _handle(self, method: str, request: Any) -> Any:
        try:
            return await asyncio.shield(asyncio.ensure_future(self._instance.handle(method, request)))
        except asyncio.CancelledError:
            if not self._instance.alive:
                raise InstanceDown(self._instance.incarnation, f"{method}: killed") from None
            raise

    @override
    async def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        requests = sent if isinstance(sent, AsyncIterator) else _one(sent)
        self.calls[method] += 1
        await self._travel(timeout)
        sent = SentRequests(requests)
        source = self._instance.handle_stream(method, sent.read())
        try:
            while True:
                response = await self._next(source, method, sent)
                if response is None:
                    return
                await self._travel(timeout)
                yield response
                # A producer may offer a sample twice; the bytes of a ledger come once, as gRPC delivers them.
                if method != "FetchLedger" and self._happens(0.03):
                    yield response
        except InstanceDown:
            sent.broken = True
            raise
        finally:
            if not sent.broken:
                sent.task.cancel()
            await source.aclose()  # type: ignore[attr-defined]

    async def _next(self, source: AsyncIterator[Any], method: str, sent: SentRequests) -> Any:
        """The next response, or a fault as soon as the instance dies or is cut off, or the sender's own error."""
        task = asyncio.ensure_future(anext(source, None))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.5)
                if not self._instance.alive or self._instance.cut_off:
                    raise InstanceDown(self._instance.incarnation, f"{method}: the stream broke")
                sent.check()
            return task.result()
        except CallRefused:
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request
