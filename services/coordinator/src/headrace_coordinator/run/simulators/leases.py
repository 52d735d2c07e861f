"""Which of a run's devices its simulators have, where `placement.simulator` names some, and the leases of these.

Rollouts and simulators act at the same time, and a device is leased to one process: devices that both keys name are
divided between the two sides. The leases are taken once the rollouts hold theirs, and released with them. Where
environments are is for the pools to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace_schema.rules.acting import apart
from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain.devices.leases import REVOKING, SIMULATE, Lease, LeaseRequest
from headrace_coordinator.domain.devices.places import device_order, hosts_of, machines, named_devices
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.run.workers.clients import SimulatorClient
from headrace_coordinator.run.workers.group import WorkerGroup

Seats = dict[str, tuple[str, ...]]
"""Devices by incarnation."""


class SimulatorLeases:
    """What simulators hold for one run."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def devices(self) -> set[str]:
        """Devices of the run that are for simulators, whether or not they hold them now."""
        section, workers = self._workers.section, self._workers
        if not section.simulator:
            return set()
        instances = workers.fleet.event_log.state.instances.values()
        return sides(section, workers.grant.devices, instances, workers.spec.rollout.instances)[1]

    async def acquire(self) -> bool:
        """Takes the leases that simulators lack, all or none; False when a simulator was lost over it."""
        clients = self._clients
        assigned = {client.incarnation: client.devices for client in clients}
        live = self._workers.fleet.event_log.state.table.leases
        lacking = [client for client in clients if not _holds(live.get(client.lease_epoch), client)]
        if not lacking:
            return True
        wanted = {device for client in lacking for device in client.devices}
        # A simulator that was told to stop keeps its devices until the step has ended, unless another is to have them.
        await self._release(
            lease
            for lease in self._held()
            if assigned.get(lease.incarnation) != tuple(lease.devices)
            and (lease.incarnation in assigned or wanted & {*lease.devices})
        )
        fleet, run = self._workers.fleet, self._workers.run
        requests = [LeaseRequest(c.incarnation, run, SIMULATE, c.devices, c.instance.host) for c in lacking]
        try:
            epochs = await fleet.lease_manager.acquire(requests, self._workers.fleet_timeout)
        except InstanceDown as down:
            state = fleet.event_log.state.instances.get(down.incarnation)
            if fleet.alive(down.incarnation) and not (state and state.draining):
                raise  # One that is told to stop may release what it is granted at the same time.
            await fleet.fate(down.incarnation)
            return False
        for client, epoch in zip(lacking, epochs, strict=True):
            client.lease_epoch = epoch
        return True

    async def release(self) -> None:
        """Releases all of them, once no rollout acts."""
        await self._release(self._held())

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
        return [client for client in self._workers.simulators if client.devices]

    def seats(self, simulators: Sequence[InstanceState], *, keep: bool) -> Seats:
        """Devices of each simulator that may be used; none, where simulators hold no leases.

        `keep`: those that hold devices keep them.
        """
        workers, table = self._workers, self._workers.fleet.event_log.state.table
        if not workers.spec.placement.simulator:
            return {each.incarnation: () for each in simulators}
        kept = {
            c.incarnation: c.devices for c in workers.simulators if keep and c.lease_epoch in table.leases
        }
        lost = {*table.quarantined}
        if kept:  # Within a step a lost simulator is not waited for: the others go on.
            mine = {each.incarnation for each in simulators}
            lost |= {
                device for lease in self._held() if lease.incarnation not in mine for device in lease.devices
            }
        return seats(simulators, self.devices() - lost, kept)


def _holds(lease: Lease | None, client: SimulatorClient) -> bool:
    return lease is not None and lease.state != REVOKING and tuple(lease.devices) == client.devices


def sides(
    section: PlacementSection, granted: Collection[str], instances: Collection[InstanceState], rollouts: int
) -> tuple[set[str], set[str]]:
    """Devices that generate and devices that simulate, of those granted; no device is in both.

    `instances` tell which devices are on one machine. On each of these are at most so many `rollouts`.
    """
    machine_of, hosts = machines(instances), hosts_of(instances)
    on: dict[str, set[str]] = {}
    for each in instances:
        on.setdefault(machine_of[each.incarnation], set()).update({*each.devices} & {*granted})
    named = {
        machine: [
            named_devices(names, sorted(devices, key=device_order), hosts)
            for names in (section.rollout, section.simulator)
        ]
        for machine, devices in on.items()
    }
    found = [apart(generates, simulates, rollouts) for generates, simulates in named.values()]
    return {d for mine, _ in found for d in mine}, {d for _, theirs in found for d in theirs}


def seats(
    simulators: Collection[InstanceState], devices: Collection[str], kept: Mapping[str, Sequence[str]]
) -> Seats:
    """A part of `devices` for each simulator that sees any of them, as long as there are; the others have none.

    Those that are `kept` stay where they are. An empty `kept` divides everything anew.
    """
    found: Seats = {}
    machine_of = machines(simulators)
    for machine in sorted({*machine_of.values()}):
        here = [each for each in simulators if machine_of[each.incarnation] == machine]
        seen = sorted({d for each in here for d in each.devices} & {*devices}, key=device_order)
        found |= _seated(sorted(here, key=lambda each: (each.instance, each.incarnation)), seen, kept)
    return found


def _seated(
    simulators: Sequence[InstanceState], devices: Sequence[str], kept: Mapping[str, Sequence[str]]
) -> Seats:
    own = {each.incarnation: tuple(kept.get(each.incarnation, ())) for each in simulators}
    found = {who: part for who, part in own.items() if part and {*part} <= {*devices}}
    taken = {device for part in found.values() for device in part}
    free = [device for device in devices if device not in taken]
    coming = [each for each in simulators if each.incarnation not in found][: len(free)]
    for index, each in enumerate(coming):
        part = free[index * len(free) // len(coming) : (index + 1) * len(free) // len(coming)]
        if usable := tuple(device for device in part if device in each.devices):
            found[each.incarnation] = usable
    return found
