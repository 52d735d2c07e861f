"""An engine that computes nothing and hands tokens out as vLLM's output processor does, at a set pace.

One task makes a token of every running request in each step and puts it into the request's collector, which joins what
its reader did not take yet; each request is an asynchronous generator over its own collector. As there, an update goes
out with the first token, with the last, and when `Request.interval` tokens have come since the one before. What the
steps themselves cost is written to a file, so that it can be taken off.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from headrace_rollout.engines.base import Capabilities, Engine, EngineConfig, Scope, WeightEntry
from headrace_rollout.engines.hosted.backend import AdapterFile, Backend, Request, Start, Tokens
from headrace_rollout.engines.hosted.engine import HostedEngine
from headrace_rollout.engines.samples import Distribution
from headrace_servicekit.registry import Options, Plugin

_LOG_PROB = -1.2345678


class PacedOptions(Options):
    """How fast, and where the cost of the steps is told."""

    step_s: float
    costs: str
    """A file: seconds of a core that the steps have taken."""


class _Collector:
    """vLLM's RequestOutputCollector: what came and was not taken is one output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made = self.sent = 0
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._ready = asyncio.Event()
        self.ended = False

    def step(self) -> None:
        """One token more."""
        self.made += 1
        self.ended = self.made >= self.request.max_new_tokens
        new = self.made - self.sent
        if self.ended or not self.sent or new >= self.request.interval:
            self._ids += range(3 + self.sent % 20, 3 + self.sent % 20 + new)
            self._log_probs += [_LOG_PROB] * new
            self.sent = self.made
            self._ready.set()

    def end(self) -> None:
        self.ended = True
        self._ready.set()

    async def get(self) -> Tokens:
        while not self._ids and not self.ended:
            await self._ready.wait()
        found = Tokens(self._ids, self._log_probs)
        self._ids, self._log_probs = [], []
        self._ready.clear()
        return found


class PacedBackend(Backend):
    """Its process is a child that sleeps."""

    name = "paced"
    capabilities = Capabilities(resume_from_prefix=True)

    def __init__(self, config: EngineConfig, options: PacedOptions) -> None:
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._running: dict[str, _Collector] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._cost_s = 0.0

    @property
    def alive(self) -> bool:
        return self._child is not None

    @property
    def pids(self) -> Sequence[int]:
        return [self._child.pid] if self._child is not None else []

    async def start(self, start: Start) -> None:
        self._child = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        if self._child is not None and self._stepping is not None:
            self._stepping.cancel()
            self._child.kill()
            self._child.wait(10)
        self._child = None

    async def _step(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._options.step_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            began = time.thread_time()
            for each in self._running.values():
                if not each.ended:
                    each.step()
            if self._running:
                self._cost_s += time.thread_time() - began
                Path(self._options.costs).write_text(str(self._cost_s))  # noqa: ASYNC240

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        collector = self._running[request.request_id] = _Collector(request)
        try:
            while True:
                found = await collector.get()
                if found.token_ids:
                    yield found
                if collector.ended and collector.made == collector.sent:
                    return
        finally:
            self._running.pop(request.request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for each in request_ids:
            if each in self._running:
                self._running[each].end()

    async def score(self, token_ids: Sequence[int], start: int, distribution: Distribution) -> list[float]:
        return [_LOG_PROB] * (len(token_ids) - start)

    async def freeze(self) -> None:
        raise NotImplementedError("it installs no version in flight")

    async def thaw(self) -> None:
        raise NotImplementedError("it installs no version in flight")

    async def begin_install(self, number: int, entries: Sequence[WeightEntry]) -> None:
        return

    async def update(
        self, path: Path, entries: Sequence[WeightEntry], adapter: AdapterFile | None = None
    ) -> None:
        path.read_bytes()  # noqa: ASYNC240

    async def finish_install(self, number: int) -> None:
        return

    async def reset_cache(self) -> None:
        return

    async def sleep(self) -> None:
        return

    async def wake(self, scope: Scope) -> None:
        return

    async def use_threads(self, threads: int) -> None:
        return


def build(options: PacedOptions, config: EngineConfig) -> Engine:
    """The adapter over this backend."""
    return HostedEngine(PacedBackend(config, options), config)


PACED = Plugin(
    build, PacedOptions, description="computes nothing, at a set pace", features=("resume_from_prefix",)
)
