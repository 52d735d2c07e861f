"""Which of a run's devices its simulators and scorers have, where `placement` names some, and the leases of these.

Rollouts, simulators and scorers act at the same time, and a device is leased to one process: devices that rollouts and
simulators both name are divided between the two sides, unless the spec lets them hold these together. The leases are
taken once the rollouts hold theirs, and released with them. Where environments are is for the pools to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from headrace_schema.rules.acting import apart
from headrace_schema.sections.running import PlacementSection
from typing_extensions import override

from headrace_coordinator.domain.devices.leases import REVOKING, SCORE, SIMULATE, Lease
from headrace_coordinator.domain.devices.places import device_order, hosts_of, machines, named_devices
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import InstanceDown, WorkerClient
from headrace_coordinator.run.workers.group import WorkerGroup

Seats = dict[str, tuple[str, ...]]
"""Devices by incarnation."""


Acquire = Callable[[Sequence[WorkerClient], str], Awaitable[None]]
"""Leases their devices to workers for a stage, all or none."""


class BesideLeases:
    """What instances that act beside the rollouts hold for one run."""

    stage: ClassVar[str]
    side: ClassVar[str]
    """The key of `placement` that names their devices; where it names none, they hold no leases."""

    def __init__(self, workers: WorkerGroup, acquire: Acquire) -> None:
        self._workers = workers
        self._acquire = acquire

    @property
    def names(self) -> Sequence[str]:
        """The devices that the spec names for them."""
        named: Sequence[str] = getattr(self._workers.spec.placement, self.side)
        return named

    @property
    def everyone(self) -> Sequence[WorkerClient]:
        """The run's clients of them."""
        raise NotImplementedError

    def devices(self) -> set[str]:
        """Devices of the run that are for them, whether or not they hold them now."""
        raise NotImplementedError

    async def acquire(self) -> bool:
        """Takes the leases that they lack, all or none; False when one was lost over it."""
        clients, fleet = self._clients, self._workers.fleet
        assigned = {client.incarnation: client.devices for client in clients}
        live = fleet.event_log.state.table.leases
        lacking = [client for client in clients if not _holds(live.get(client.lease_epoch), client)]
        if not lacking:
            return True
        wanted = {device for client in lacking for device in client.devices}
        # One that was told to stop keeps its devices until the step has ended, unless another is to have them.
        await self._release(
            lease
            for lease in self._held()
            if assigned.get(lease.incarnation) != tuple(lease.devices)
            and (lease.incarnation in assigned or wanted & {*lease.devices})
        )
        try:
            await self._acquire(lacking, self.stage)
        except InstanceDown as down:
            state = fleet.event_log.state.instances.get(down.incarnation)
            if fleet.alive(down.incarnation) and not (state and state.draining):
                raise  # One that is told to stop may release what it is granted at the same time.
            await fleet.fate(down.incarnation)
            return False
        return True

    async def release(self, wanted: Collection[str] | None = None) -> None:
        """Releases all of them, or those of `wanted` devices, once no rollout acts."""
        await self._release(lease for lease in self._held() if wanted is None or {*wanted} & {*lease.devices})

    async def _release(self, held: Iterable[Lease]) -> None:
        epochs = [lease.epoch for lease in held]
        await self._workers.fleet.lease_manager.release(self._workers.run, epochs)
        for client in self._clients:
            if client.lease_epoch in epochs:
                client.lease_epoch = 0

    def _held(self) -> list[Lease]:
        live = self._workers.fleet.event_log.state.table.leases.values()
        return [lease for lease in live if (lease.run, lease.stage) == (self._workers.run, self.stage)]

    @property
    def _clients(self) -> list[WorkerClient]:
        return [client for client in self.everyone if client.devices]

    def seats(self, instances: Sequence[InstanceState], *, keep: bool) -> Seats:
        """Devices of each instance that may be used; none, where they hold no leases.

        `keep`: those that hold devices keep them.
        """
        table = self._workers.fleet.event_log.state.table
        if not self.names:
            return {each.incarnation: () for each in instances}
        kept = {c.incarnation: c.devices for c in self.everyone if keep and c.lease_epoch in table.leases}
        lost = {*table.quarantined}
        if kept:  # Within a step a lost one is not waited for: the others go on.
            mine = {each.incarnation for each in instances}
            lost |= {
                device for lease in self._held() if lease.incarnation not in mine for device in lease.devices
            }
        return seats(instances, self.devices() - lost, kept)


class SimulatorLeases(BesideLeases):
    """What simulators hold for one run."""

    stage, side = SIMULATE, "simulator"

    @property
    @override
    def everyone(self) -> Sequence[WorkerClient]:
        return self._workers.simulators

    @override
    def devices(self) -> set[str]:
        section, workers = self._workers.placement.section, self._workers
        if not section.simulator:
            return set()
        instances = workers.fleet.event_log.state.instances.values()
        engines = workers.spec.rollout.instances * workers.spec.engines
        return sides(section, workers.grant.devices, instances, engines)[1]


class ScorerLeases(BesideLeases):
    """What reward instances hold for one run: their scorers compute there."""

    stage, side = SCORE, "reward"

    @property
    @override
    def everyone(self) -> Sequence[WorkerClient]:
        return self._workers.rewards

    @override
    def devices(self) -> set[str]:
        hosts = hosts_of(self._workers.fleet.event_log.state.instances.values())
        granted = sorted(self._workers.grant.devices, key=device_order)
        return {*named_devices(self.names, granted, hosts)}


def _holds(lease: Lease | None, client: WorkerClient) -> bool:
    return lease is not None and lease.state != REVOKING and tuple(lease.devices) == client.devices


def sides(
    section: PlacementSection, granted: Collection[str], instances: Collection[InstanceState], engines: int
) -> tuple[set[str], set[str]]:
    """Of the granted devices, those that generate and those that simulate; only those of joint leases are in both.

    `instances` say which devices are on one machine. `engines`: most engines on one machine.
    """
    machine_of, hosts = machines(instances), hosts_of(instances)
    on: dict[str, set[str]] = {}
    for each in instances:
        on.setdefault(machine_of[each.incarnation], set()).update({*each.devices} & {*granted})
    found = []
    for devices in on.values():
        here = sorted(devices, key=device_order)
        generates, simulates = (
            named_devices(names, here, hosts) for names in (section.rollout, section.simulator)
        )
        found.append((generates, simulates) if section.joint else apart(generates, simulates, engines))
    return {d for mine, _ in found for d in mine}, {d for _, theirs in found for d in theirs}


def seats(
    instances: Collection[InstanceState], devices: Collection[str], kept: Mapping[str, Sequence[str]]
) -> Seats:
    """A part of `devices` for each instance that sees any of them, as long as there are; the others have none.

    Those that are `kept` stay where they are. An empty `kept` divides everything anew.
    """
    found: Seats = {}
    machine_of = machines(instances)
    for machine in sorted({*machine_of.values()}):
        here = [each for each in instances if machine_of[each.incarnation] == machine]
        seen = sorted({d for each in here for d in each.devices} & {*devices}, key=device_order)
        found |= _seated(sorted(here, key=lambda each: (each.instance, each.incarnation)), seen, kept)
    return found


def _seated(
    instances: Sequence[InstanceState], devices: Sequence[str], kept: Mapping[str, Sequence[str]]
) -> Seats:
    own = {each.incarnation: tuple(kept.get(each.incarnation, ())) for each in instances}
    found = {who: part for who, part in own.items() if part and {*part} <= {*devices}}
    taken = {device for part in found.values() for device in part}
    free = [device for device in devices if device not in taken]
    coming = [each for each in instances if each.incarnation not in found][: len(free)]
    for index, each in enumerate(coming):
        part = free[index * len(free) // len(coming) : (index + 1) * len(free) // len(coming)]
        if usable := tuple(device for device in part if device in each.devices):
            found[each.incarnation] = usable
    return found
