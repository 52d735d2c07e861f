"""A stream of an engine that collects what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_rollout.engines.samples import Distribution, SlotKey, Stream, TrajectoryUpdate

WAIT_S = 120.0  # an engine of another process computes slowly on a CPU


@dataclass
class Collector:
    """What came back on one stream, by slot."""

    outputs: list[TrajectoryUpdate] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def sink(self, outputs: list[TrajectoryUpdate]) -> None:
        self.loop.call_soon_threadsafe(self._take, list(outputs))

    def failed(self, reason: str) -> None:
        self.loop.call_soon_threadsafe(self._fail, reason)

    def stream(self, distribution: Distribution | None = None, **options) -> Stream:
        defaults = {"policy_number": 1, "max_new_tokens": 24, "seed": 7}
        return Stream(
            distribution=distribution or Distribution(),
            sink=self.sink,
            failed=self.failed,
            **{**defaults, **options},
        )

    def ended(self) -> dict[SlotKey, TrajectoryUpdate]:
        return {output.key: output for output in self.outputs if output.whole is not None}

    async def wait(self, condition: Callable[[Collector], bool], *, failing: bool = False) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                assert failing or not self.failures, self.failures
                self.changed.clear()
                await self.changed.wait()

    async def wait_ended(self, count: int) -> dict[SlotKey, TrajectoryUpdate]:
        await self.wait(lambda self: len(self.ended()) >= count)
        return self.ended()

    def _take(self, outputs: list[TrajectoryUpdate]) -> None:
        self.outputs += outputs
        self.changed.set()

    def _fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.changed.set()
