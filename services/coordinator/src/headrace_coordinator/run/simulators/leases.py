"""The leases of a run's simulators: taken once its rollouts hold theirs, and released with them.

Without `placement.simulator` there are none. Which devices a simulator has is `simulator_seats`' to say; where its
environments are, the pools'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain.devices.leases import REVOKING, SIMULATE, Lease, LeaseRequest
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.run.simulators.seats import Seats, seats, sides
from headrace_coordinator.run.workers.clients import SimulatorClient
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import RolloutClient


class SimulatorLeases:
    """What simulators hold for one run. `moving` is held while devices change hands."""

    def __init__(
        self, workers: WorkerGroup, section: Callable[[], PlacementSection], moving: asyncio.Lock
    ) -> None:
        self._workers = workers
        self._section = section
        self._moving = moving
        if section().simulator and workers.pools is not None:
            workers.pools.seats = self._seats

    def devices(self) -> set[str]:
        """Those of the run that simulators have, whoever holds them now."""
        section, workers = self._section(), self._workers
        if not section.simulator:
            return set()
        instances = workers.fleet.event_log.state.instances.values()
        return sides(section, workers.grant.devices, instances, workers.spec.rollout.instances)[1]

    async def staff(self, member: RolloutClient) -> None:
        """Before a stream of episodes: the member has environments, at simulators that hold their devices."""
        while True:
            await self._workers.staff_simulators(member)
            async with self._moving:
                if await self._taken():
                    return

    async def take(self) -> None:
        """With the rollouts' devices. One that is lost meanwhile is left to `staff`."""
        await self._taken()

    async def let_go(self) -> None:
        """With the rollouts' devices, once nobody acts."""
        await self._release(self._held())

    async def _taken(self) -> bool:
        """Takes what is lacking, all or nothing; False when a simulator was lost over it."""
        clients = self._clients
        welcome = {client.incarnation: client.devices for client in clients}
        live = self._workers.fleet.event_log.state.table.leases
        lacking = [client for client in clients if not _holds(live.get(client.lease_epoch), client)]
        if not lacking:
            return True
        wanted = {device for client in lacking for device in client.devices}
        # One that was told to stop keeps its own until the step has ended, unless another is to have them.
        await self._release(
            lease
            for lease in self._held()
            if welcome.get(lease.incarnation) != tuple(lease.devices)
            and (lease.incarnation in welcome or wanted & {*lease.devices})
        )
        fleet, run = self._workers.fleet, self._workers.run
        requests = [LeaseRequest(c.incarnation, run, SIMULATE, c.devices, c.instance.host) for c in lacking]
        try:
            epochs = await fleet.lease_manager.acquire(requests, self._workers.fleet_timeout)
        except InstanceDown as down:
            if fleet.alive(down.incarnation):
                raise
            await fleet.fate(down.incarnation)
            return False
        for client, epoch in zip(lacking, epochs, strict=True):
            client.lease_epoch = epoch
        return True

    async def _release(self, held: Iterable[Lease]) -> None:
        epochs = [lease.epoch for lease in held]
        await self._workers.fleet.lease_manager.release(self._workers.run, epochs)
        for client in self._clients:
            if client.lease_epoch in epochs:
                client.lease_epoch = 0

    def _held(self) -> list[Lease]:
        live = self._workers.fleet.event_log.state.table.leases.values()
        return [lease for lease in live if (lease.run, lease.stage) == (self._workers.run, SIMULATE)]

    @property
    def _clients(self) -> list[SimulatorClient]:
        clients = self._workers.pools.clients if self._workers.pools else []
        return [client for client in clients if client.devices]

    def _seats(self, simulators: Sequence[InstanceState], kept: Mapping[str, Sequence[str]]) -> Seats:
        table = self._workers.fleet.event_log.state.table
        lost = {*table.quarantined}
        if kept:  # Within a step nobody waits for a simulator that was lost: the others go on.
            mine = {each.incarnation for each in simulators}
            lost |= {
                device for lease in self._held() if lease.incarnation not in mine for device in lease.devices
            }
        return seats(simulators, self.devices() - lost, kept)


def _holds(lease: Lease | None, client: SimulatorClient) -> bool:
    return lease is not None and lease.state != REVOKING and tuple(lease.devices) == client.devices
