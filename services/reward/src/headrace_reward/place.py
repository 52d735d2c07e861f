"""Where a run's children judge: on the devices of its lease, or on the host's CPU where it has none.

A child sees the GPUs of the lease that it was started under, and no others: without a lease, none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace_servicekit.lease.devices import bind_cpu, gpu_uuids
from headrace_servicekit.process.worker import UsersCode, Worker
from headrace_servicekit.process.worker_pipes import JSON_CODEC
from headrace_servicekit.process.worker_pipes import JsonMessage as Message

RENEWAL_S = 0.2
"""After so long, a lease that was not renewed in time is looked at again."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Place:
    """The devices of one run's children. Without `leased`, they need no lease and see no GPU."""

    def __init__(self, code: UsersCode, *, leased: bool) -> None:
        self._code, self._leased = code, leased
        self._devices: tuple[str, ...] = ()
        self._holds: Callable[[], bool] = lambda: not leased
        self._changed = asyncio.Event()
        self._children: dict[int, tuple[Worker[Message], tuple[str, ...]]] = {}
        """Those that live, by process, and the devices that each was started on."""
        self._working = 0

    @property
    def held(self) -> bool:
        """Whether children may judge now."""
        return self._holds()

    async def granted(self) -> None:
        """Returns once children may judge."""
        while not self.held:
            try:
                async with asyncio.timeout(RENEWAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def lease(self, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """Children judge on these devices from now on; `holds`: whether the lease may be used still."""
        if self._leased:
            self._devices, self._holds = tuple(devices), holds
            for process in self._children:
                bind_cpu(self._devices, process)
            self._changed.set()

    def fits(self, child: Worker[Message]) -> bool:
        """Whether a child lives, and sees the GPUs of the present lease."""
        own, on = self._children.get(child.process.pid, (None, ()))
        return own is child and gpu_uuids(on) == gpu_uuids(self._devices)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts what is judged meanwhile."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._changed.set()

    async def start(self, memory_bytes: int) -> Worker[Message]:
        """A child on the devices of the present lease. CUDA reserves more addresses than any limit of memory."""
        gpus = gpu_uuids(self._devices)
        variables = {VISIBLE: ",".join(gpus)}
        child = await Worker.start(
            "headrace_reward.child", JSON_CODEC, 0 if gpus else memory_bytes, variables, self._code
        )
        bind_cpu(self._devices, child.process.pid)
        living = {pid: each for pid, each in self._children.items() if each[0].process.returncode is None}
        self._children = {**living, child.process.pid: (child, self._devices)}
        return child

    async def settle(self, notice_s: float) -> None:
        """Lets no child judge, waits for what is judged at most so long, and ends those on GPUs."""
        if not self._leased:
            return
        self._holds = lambda: False
        late = asyncio.get_running_loop().time() + notice_s
        while self._working and asyncio.get_running_loop().time() < late:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(late):
                    await self._changed.wait()
            except TimeoutError:
                break
        for process, (child, on) in list(self._children.items()):
            if gpu_uuids(on) or self._working:
                del self._children[process]
                await child.kill()
        self._devices = ()
