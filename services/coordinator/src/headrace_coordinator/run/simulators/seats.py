"""Which of a run's devices its simulators have, where `placement.simulator` names some.

Rollouts and simulators act at the same time, and a device is leased to one process: those that both keys name are
divided between the two sides. Knows no lease of its own: who holds what comes with the question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace_schema.rules.acting import apart
from headrace_schema.sections.running import PlacementSection

from headrace_coordinator.domain.devices.places import device_order, hosts_of, machines, named_devices
from headrace_coordinator.domain.state import InstanceState

Seats = dict[str, tuple[str, ...]]
"""Devices by incarnation."""


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
