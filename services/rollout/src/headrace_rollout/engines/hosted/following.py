"""A part of an engine that another instance leads: its processes on this host, and the versions that these take.

The leader says when its engine starts and ends. Takes no samples. Knows no engine but by `Part`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_modelkit.loading import context_limit, load_architecture
from headrace_servicekit.rpc.client import dial
from typing_extensions import override

from headrace_rollout.engines.base import (
    Authority,
    Capabilities,
    Engine,
    EngineConfig,
    Freed,
    Policy,
    Refused,
    Scope,
    Weights,
    allowed,
)
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.hosted.backend import AdapterFile, Start, version_key
from headrace_rollout.engines.hosted.installing import check_entries, file_of, shapes_of
from headrace_rollout.engines.hosted.processes import Watermark
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream

if TYPE_CHECKING:
    import torch

KEPT = 2
"""Versions whose bytes stay: the leader puts the one before back where an install breaks off."""
LOOK_S, AGAIN_S = 0.5, 0.5
_log = logging.getLogger(__name__)


class Part(Protocol):
    """Processes of an engine on this host; all calls may block."""

    capabilities: Capabilities

    @property
    def pids(self) -> Sequence[int]:
        """Those that run."""

    def start(self, start: Start, meeting: rollout_pb2.FollowResponse, files: Path) -> None:
        """Starts them; they find versions in `files`."""

    def stop(self) -> None:
        """Ends them, by SIGKILL, and returns when they have ended."""


class FollowerEngine(Engine):
    """What an instance of rank 1 and above has in an engine's place."""

    def __init__(
        self,
        part: Part,
        config: EngineConfig,
        hello: rollout_pb2.FollowRequest,
        leader: str,
        token: str | None,
    ) -> None:
        architecture = load_architecture(config.model)
        self.capabilities = part.capabilities
        self.max_context_tokens = context_limit(config.model, architecture)
        self.vocabulary_size = int(architecture.get_text_config().vocab_size)
        self.figures = Figures()
        self._shapes = shapes_of(config.model)
        self._part = part
        self._state, self._leader, self._token = hello, leader, token
        self._policy: Policy | None = None
        self._paused = False
        self._start = Start((), 1)
        self._files = Path(tempfile.mkdtemp(prefix="headrace-follower-"))
        self._staged: deque[tuple[str, list[int]]] = deque()
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def relays(self) -> Path | None:
        """Where its part's workers listen that take part in broadcasts; None while it has none."""
        return self._files if self._part.pids else None

    @property
    def policy(self) -> Policy | None:
        """The version whose bytes lie ready."""
        return self._policy

    @property
    @override
    def paused(self) -> bool:
        return self._paused

    @property
    @override
    def prefills(self) -> Sequence[Prefills]:
        return []

    @property
    @override
    def waiting_samples(self) -> int:
        return 0

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        self._refuse()

    @override
    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        self._refuse()

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:
        return 0

    @override
    async def pause(self) -> int:
        self._paused = True
        return 0

    @override
    async def resume(self) -> None:
        self._paused = False

    @override
    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        found = self._policy is not None and self._policy.digest == policy.digest
        self._policy = policy if found else self._policy
        return found

    @override
    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:
        """Lays a version ready for the workers here, which the leader has take it."""
        authority()
        if await self.check_install(policy):
            return 0.0
        check_entries(self._shapes, weights.entries)
        self._stage(weights)
        self._policy = policy
        self._say()
        return 0.0

    @override
    async def suspend(self) -> Freed:
        """The leader's engine frees what its workers have here."""
        if not self._paused:
            raise Refused("NOT_PAUSED", "Suspend needs a paused engine; call Pause first")
        return Watermark(self._start.devices, self._part.pids).freed()

    @override
    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        authority()
        self._paused = self._paused and scope is Scope.WEIGHTS

    @override
    async def release(self) -> Freed:
        """The engine's part ends with the lease."""
        mark = Watermark(self._start.devices, self._part.pids)
        await self._end("its lease is over")
        self._start = Start((), 1)
        self._paused, self._policy = False, None
        self._drop_staged(0)
        self._say()
        return mark.freed()

    @override
    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._follow(), name="follow"),
                asyncio.create_task(self._watch()),
            ]
        if devices and devices != self._start.devices:
            await self._end("it has other devices")
            self._start = Start(devices, threads, str(self._files))
        self._say()

    @override
    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.release()
        await asyncio.to_thread(shutil.rmtree, self._files, ignore_errors=True)

    def _refuse(self) -> NoReturn:
        raise Refused(
            "INVALID", f"this instance is a part of the engine that {self._leader} leads; ask that one"
        )

    def _stage(self, weights: Weights) -> None:
        adapter, files = None, [weights]
        if weights.adapter is not None:
            adapter = AdapterFile(self._files, weights.adapter.weights.entries, weights.adapter.scale)
            files.append(weights.adapter.weights)
        key, handles = version_key(weights.entries, adapter), []
        for name, each in zip((key, f"{key}.adapter"), files, strict=False):
            with file_of(each) as path:
                handles.append(os.open(path, os.O_RDONLY))  # the bytes stay, whatever becomes of the name
            link = self._files / name
            link.unlink(missing_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{handles[-1]}")
        self._staged.append((key, handles))
        self._drop_staged(KEPT)

    def _drop_staged(self, kept: int) -> None:
        while len(self._staged) > kept:
            key, handles = self._staged.popleft()
            if key not in {other for other, _ in self._staged}:
                for name in (key, f"{key}.adapter"):
                    (self._files / name).unlink(missing_ok=True)
            for handle in handles:
                os.close(handle)

    def _say(self) -> None:
        self._state.placed = bool(self._start.devices)
        del self._state.versions[:]
        self._state.versions.extend(key for key, _ in self._staged)
        self._news.set()

    async def _follow(self) -> None:
        """Obeys the leader; without one, nothing runs here."""
        while True:
            with suppress(grpc.aio.AioRpcError):
                async with dial(self._leader, token=self._token) as channel:
                    stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call]
                    async for asked in stub.Follow(self._states()):
                        await self._obey(asked)
            await self._end("")
            self._state.start, self._state.ended = 0, ""
            await asyncio.sleep(AGAIN_S)

    async def _states(self) -> AsyncIterator[rollout_pb2.FollowRequest]:
        while True:
            self._news.clear()
            now = rollout_pb2.FollowRequest()
            now.CopyFrom(self._state)
            yield now
            await self._news.wait()

    async def _obey(self, asked: rollout_pb2.FollowResponse) -> None:
        if asked.start == self._state.start:
            return
        await self._end("")
        async with self._turn:
            self._state.start, self._state.ended = asked.start, ""
            if asked.start and not self._start.devices:
                self._state.ended = "it holds no devices"
            elif asked.start:
                try:
                    await asyncio.to_thread(self._part.start, self._start, asked, self._files)
                except (ValueError, RuntimeError, OSError) as error:
                    self._state.ended = f"it did not start: {error}"
        self._say()

    async def _end(self, why: str) -> None:
        async with self._turn:
            ran = bool(self._part.pids)
            await asyncio.to_thread(self._part.stop)
            if ran and why:
                self._state.ended = why
                self._news.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._turn:
                if self._state.start and not self._state.ended and not self._part.pids:
                    _log.error("the part of an engine ended", extra={"leader": self._leader})
                    self._state.ended = "its process ended"
                    self._news.set()
