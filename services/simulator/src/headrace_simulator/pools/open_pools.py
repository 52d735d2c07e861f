"""The open pools of this instance: opened once per request, counted, closed. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.memory.blobs import BlobStore

from headrace_simulator.config import SimulatorSettings
from headrace_simulator.pools.brokers import Brokers
from headrace_simulator.pools.pool import EnvironmentPool, PoolPlan

_REMEMBERED_REQUESTS = 4096


class Conflict(Exception):
    """One request id was used for two pools, or for a pool that is closed."""


class TooMany(Exception):
    """The pool would take more environments than this instance may have."""


@dataclass
class _Opening:
    plan: PoolPlan
    pool: asyncio.Task[EnvironmentPool]


class Pools:
    """Pools by name. An opening is keyed by (run, request id). `on_gpus`: leases are on GPUs here."""

    def __init__(
        self, settings: SimulatorSettings, blobs: BlobStore, brokers: Brokers, *, on_gpus: bool = False
    ) -> None:
        self._settings, self._blobs, self._on_gpus, self._brokers = settings, blobs, on_gpus, brokers
        self._numbers = count(1)
        self._openings: OrderedDict[tuple[str, str], _Opening] = OrderedDict()
        self._pools: dict[str, tuple[str, EnvironmentPool]] = {}
        self._reserved = 0
        self._leases: dict[int, tuple[str, tuple[str, ...], float]] = {}
        """Run, devices and the part of their memory by epoch."""

    def lease(self, epoch: int, run: str, devices: Sequence[str], memory_part: float = 1.0) -> None:
        """A run's pools that need a lease act on these devices from their next operation on."""
        self._leases[epoch] = run, tuple(devices), memory_part
        for pool in self._leased(run):
            pool.use(devices, memory_part)

    async def open(self, run: str, request_id: str, plan: PoolPlan) -> EnvironmentPool:
        """Opens a pool, or finds the one that the same request opened.

        Raises:
            Conflict: the request id was used for another plan, or its pool was closed since.
            TooMany: see the class.
            HostFault, HostLost: see EnvironmentPool.open.
        """
        key = (run, request_id)
        opening = self._openings.get(key)
        if opening is None:
            opening = _Opening(plan, asyncio.create_task(self._open(run, plan)))
            self._openings[key] = opening
            opening.pool.add_done_callback(lambda task: self._forget_failure(key, task))
        elif opening.plan != plan:
            raise Conflict(
                f"request_id {request_id!r} opened a pool with other settings; use a new request_id"
            )
        pool = await asyncio.shield(opening.pool)
        if pool.name not in self._pools:
            raise Conflict(
                f"{pool.name}, which request_id {request_id!r} opened, was closed; use a new request_id"
            )
        return pool

    def get(self, name: str) -> EnvironmentPool | None:
        """The open pool of that name."""
        entry = self._pools.get(name)
        return entry[1] if entry else None

    def runs(self) -> set[str]:
        """Runs that have a pool, or one that is being opened."""
        opening = {run for (run, _), opening in self._openings.items() if not opening.pool.done()}
        return opening | {run for run, _ in self._pools.values()}

    async def settle(self, epoch: int, notice_s: float) -> None:
        """Returns once nothing runs under a lease; kills what takes longer than `notice_s`.

        Pools stay, without their processes where these are on a GPU.
        """
        run, devices, _ = self._leases.pop(epoch, (None, (), 1.0))
        leased = self._leased(run)
        await asyncio.gather(*(pool.settle(notice_s) for pool in leased))
        if gpu_uuids(devices):
            await asyncio.gather(*(pool.end_processes() for pool in leased))

    def _leased(self, run: str | None) -> list[EnvironmentPool]:
        """Pools that need a lease, of one run or of all."""
        pools = self._pools.values()
        return [pool for owner, pool in pools if pool.plan.leased and run in (None, owner)]

    async def close(self, name: str) -> None:
        """Closes a pool; one that is not open stays closed."""
        entry = self._pools.pop(name, None)
        if entry is not None:
            self._reserved -= entry[1].plan.count
            await entry[1].close()

    async def close_run(self, run: str) -> None:
        """Closes every pool of a run, those that are being opened too."""
        openings = [opening.pool for (owner, _), opening in self._openings.items() if owner == run]
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        for name in [name for name, (owner, _) in self._pools.items() if owner == run]:
            await self.close(name)

    async def close_all(self) -> None:
        """Closes every pool, those that are being opened too."""
        for run in {run for run, _ in self._openings} | self.runs():
            await self.close_run(run)
        await self._brokers.close()

    async def _open(self, run: str, plan: PoolPlan) -> EnvironmentPool:
        limit = self._settings.environments
        if self._reserved + plan.count > limit:
            raise TooMany(
                f"count: {plan.count} environments beside the {self._reserved} that are open are more than "
                f"{limit}; lower it, close a pool, or raise HEADRACE_SIMULATOR_ENVIRONMENTS"
            )
        self._reserved += plan.count
        pool = EnvironmentPool(
            f"pools/{next(self._numbers)}", plan, self._settings, self._blobs, self._brokers
        )
        self._place(pool, run)
        try:
            await pool.open()
        except BaseException:  # cancelled too: the places it reserved are free again
            self._reserved -= plan.count
            raise
        self._pools[pool.name] = (run, pool)
        if not self._place(pool, run) and plan.leased and self._on_gpus:
            await pool.end_processes()  # What making them took of a GPU is not the run's yet.
        return pool

    def _place(self, pool: EnvironmentPool, run: str) -> bool:
        """A pool that needs a lease acts on the devices of its run's; whether there is one."""
        found = [each for each in self._leases.values() if pool.plan.leased and each[0] == run]
        for _, devices, memory_part in found:
            pool.use(devices, memory_part)
        return bool(found)

    def _forget_failure(self, key: tuple[str, str], task: asyncio.Task[EnvironmentPool]) -> None:
        # A retry of a request that failed tries again.
        if task.cancelled() or task.exception() is not None:
            self._openings.pop(key, None)
        while len(self._openings) > _REMEMBERED_REQUESTS:
            self._openings.popitem(last=False)
