"""A policy that one thread of this process holds: its versions, its memory and its devices.

Commands go through a one-thread executor in turn, so that they act between two pieces of the policy's work. A
piece that takes less time than handing it to the thread is done in the event loop while the thread is idle. Knows no
text and no robot.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Protocol, TypeVar

import torch
from headrace_modelkit.threads import Threads
from headrace_servicekit.failpoints import failpoint_sync
from typing_extensions import override

from headrace_rollout.engines.base import (
    Adapter,
    Authority,
    Freed,
    Policy,
    PolicyHolder,
    Refused,
    Scope,
    Weights,
    WeightView,
    allowed,
)
from headrace_rollout.engines.merging import merged_parts
from headrace_rollout.engines.policy_state import MemoryState, is_installed
from headrace_rollout.engines.weight_memory import HOST, available_bytes, return_to_system, used_bytes

_Result = TypeVar("_Result")


class HeldModel(Protocol):
    """A model whose weights come, are released, and come again; used from the holder's thread alone."""

    policy: Policy | None
    device: torch.device

    def install(self, policy: Policy, tensors: Sequence[WeightView], beside: Mapping[str, Adapter]) -> float:
        """Takes all weights, or none (ValueError), and the adapters beside them; returns the seconds it took."""

    def place(self, device: torch.device) -> None:
        """Runs on `device` from now on; on another one than before, nothing is installed."""

    def take_memory(self) -> None:
        """Room for the weights."""

    def free_memory(self) -> None:
        """Drops weights and whatever was computed with them."""


class ThreadedHolder(PolicyHolder, ABC):
    """A policy holder whose work is its subclass's."""

    installs_in_flight = False

    def __init__(self, model: HeldModel, thread: str) -> None:
        self._held = model
        self._threads = Threads()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=thread)
        self._at_work = Lock()
        self._memory = MemoryState.COLD
        self._paused = False
        self._closed = False

    @property
    def policy(self) -> Policy | None:
        """The installed version."""
        return self._held.policy

    @property
    def paused(self) -> bool:
        """True from pause (or suspend) to resume (or wake)."""
        return self._paused

    @abstractmethod
    def _go_on(self) -> None:
        """Before an install in flight: samples go on behind what they have; called in the thread."""

    @abstractmethod
    def _begin_with(self, policy: Policy) -> None:
        """Samples are of this version from now on; called in the thread."""

    @abstractmethod
    def _living(self) -> int:
        """Samples that run or wait; called in the thread."""

    @abstractmethod
    def _stop_all(self) -> int:
        """Ends all samples that live in the thread with their partial outputs; returns how many. Called in it."""

    @abstractmethod
    def _forget_work(self) -> None:
        """Drops what the thread keeps of samples that have ended; called in it."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._held.device

    @override
    async def pause(self) -> int:

        def act() -> int:
            self._paused = True
            return self._stop_all()

        return await self._call(act)

    @override
    async def resume(self) -> None:

        def act() -> None:
            self._memory.check_resume()
            self._paused = False

        await self._call(act)

    @override
    async def check_install(self, policy: Policy, *, in_flight: bool = False) -> bool:
        return await self._call(lambda: self._check_install(policy, in_flight=in_flight))

    @override
    async def install(
        self, policy: Policy, weights: Weights, authority: Authority = allowed, *, in_flight: bool = False
    ) -> float:
        # On the host adapters are merged beside the work, on a GPU where the weights are.
        beside_work = weights.adapter is not None and self._held.device == HOST
        merged = await asyncio.to_thread(merged_parts, weights) if beside_work else None

        def act() -> float:
            authority()
            if self._check_install(policy, in_flight=in_flight):
                return 0.0
            goes_on = in_flight and self.policy is not None
            if goes_on:
                self._go_on()
                failpoint_sync("rollout.install.in_flight")
            views = weights.parts() if merged is None else merged
            seconds = self._held.install(policy, views, weights.beside)
            lent = weights.lent if any(view.on_device is not None for view in views) else None
            if lent is not None and not lent.held:
                # Its owner may have ended while it was read: the bytes of the host hold.
                seconds += self._held.install(policy, replace(weights, lent=None).parts(), weights.beside)
            if not goes_on:
                self._begin_with(policy)
            if self._memory is MemoryState.COLD:
                self._memory = MemoryState.AWAKE
            return seconds

        return await self._call(act)

    @override
    async def suspend(self) -> Freed:
        """Released bytes are the fall of resident memory (CPU) or of the device's use."""

        def act() -> Freed:
            if not self._paused:
                raise Refused("NOT_PAUSED", "Suspend needs a paused engine; call Pause first")
            self._memory = MemoryState.SUSPENDED
            return self._free()

        return await self._call(act)

    @override
    async def release(self) -> Freed:

        def act() -> Freed:
            self._stop_all()
            self._memory, self._paused = MemoryState.COLD, False
            freed = self._free()
            self._held.place(HOST)
            return freed

        return await self._call(act)

    @override
    async def wake(self, scope: Scope, authority: Authority = allowed) -> None:
        """Once all is awake, work may go on without Resume."""

        def act() -> None:
            authority()
            for part in self._memory.to_take(scope, installed=self.policy is not None):
                if part is Scope.WEIGHTS:
                    self._held.take_memory()
                    self._memory = MemoryState.WEIGHTS
                else:
                    self._memory, self._paused = MemoryState.AWAKE, False

        await self._call(act)

    @override
    async def place(self, devices: tuple[torch.device, ...], threads: int) -> None:
        """Torch counts threads by the thread that asks, so the holder's thread must."""

        def act() -> None:
            self._threads.lease(threads)
            if devices:
                self._held.place(devices[0])

        await self._call(act)

    @override
    async def close(self) -> None:
        await self.release()
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)

    async def _call(self, act: Callable[[], _Result]) -> _Result:
        if self._closed:
            raise Refused("NOT_OPEN", "the run was closed; call OpenRun first")
        return await asyncio.wrap_future(self._executor.submit(self._alone, act))

    def _alone(self, act: Callable[[], _Result]) -> _Result:
        with self._at_work:
            return act()

    def _at_once(self, act: Callable[[], _Result]) -> _Result | Awaitable[_Result]:
        """The result of a short piece of work, done here where the thread is idle: to hand it over costs as much."""
        if self._closed or not self._at_work.acquire(blocking=False):
            return self._call(act)
        try:
            return act()
        finally:
            self._at_work.release()

    def _free(self) -> Freed:
        device = self._held.device
        before = used_bytes(device)
        self._forget_work()
        self._held.free_memory()
        return_to_system(device)
        after = used_bytes(device)
        return Freed(max(0, before - after), available_bytes(device), after)

    def _check_install(self, policy: Policy, *, in_flight: bool) -> bool:
        if in_flight and not self.installs_in_flight:
            raise Refused("INVALID", "in_flight: this policy installs between samples only; pause first")
        found = is_installed(policy, self.policy, self._memory, self._living(), in_flight=in_flight)
        if found and policy != self.policy:
            # A rewind gives old weights a new number.
            self._held.policy = policy
            if not in_flight:
                self._begin_with(policy)
        return found
