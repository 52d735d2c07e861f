"""Which instances share a machine or make one engine, and which devices a spec's names mean. Knows no run and no lease.

Two containers have different hosts and may see the same devices: they are on one machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from headrace_schema.sections.running import EVERY

from headrace_coordinator.domain.state import InstanceState


def machines(instances: Iterable[InstanceState]) -> dict[str, str]:
    """Incarnation → its machine, by the first name of the hosts on it: those that share a device, at any remove."""
    ordered = sorted(instances, key=lambda instance: instance.host)
    machine_of: dict[str, str] = {}  # of hosts and of devices
    for instance in ordered:
        names = [instance.host, *instance.devices]
        joined = {machine_of[name] for name in names if name in machine_of}
        machine = min({instance.host, *joined})
        machine_of |= {name: machine for name, known in machine_of.items() if known in joined}
        machine_of |= dict.fromkeys(names, machine)
    return {instance.incarnation: machine_of[instance.host] for instance in ordered}


def devices_seen(instances: Iterable[InstanceState]) -> set[str]:
    """Devices that at least one of the instances can use."""
    return {device for instance in instances for device in instance.devices}


def hosts_of(instances: Iterable[InstanceState]) -> dict[str, set[str]]:
    """Device → hosts whose instances see it."""
    found: dict[str, set[str]] = defaultdict(set)
    for instance in instances:
        for device in instance.devices:
            found[device].add(instance.host)
    return found


def named_devices(
    names: Sequence[str], devices: Sequence[str], hosts: Mapping[str, Iterable[str]] | None = None
) -> list[str]:
    """Those of `devices` that `names` mean.

    A name is "cpu:0", its number alone ("0"), or "all"; behind "HOST/" or a full name's first part, on that machine.
    `hosts`: see `hosts_of`.

    >>> named_devices(["0", "b/all"], ["x/cpu:0", "x/cpu:1", "y/cpu:3"], {"y/cpu:3": {"b"}})
    ['x/cpu:0', 'y/cpu:3']
    """
    at = hosts or {}
    found = [device for device in devices if any(_means(name, device, at.get(device, ())) for name in names)]
    return list(dict.fromkeys(found))


def _means(name: str, device: str, hosts: Iterable[str]) -> bool:
    where, _, wanted = name.rpartition("/")
    owner, _, short = device.rpartition("/")
    if where and where != owner and where not in hosts:
        return False
    return wanted in (EVERY, short, short.rpartition(":")[2])


def device_order(device: str) -> tuple[str, int, str]:
    """Sorts device names by their index: cpu:2 comes before cpu:10."""
    stem, _, index = device.rpartition(":")
    return (stem, int(index), "") if index.isdigit() else (device, 0, "")


class OnHost(Protocol):
    """A rollout instance, by its process and its host."""

    incarnation: str
    host: str


Member = TypeVar("Member", bound=OnHost)


def engine_groups(
    instances: Sequence[Member], hosts: int, known: Iterable[Sequence[str]] = ()
) -> list[list[Member]]:
    """Groups of `hosts` instances on different hosts, in their order; what makes no whole group is left out.

    `known`: groups by incarnations, which stay as they are while all their members are there.
    """
    if hosts == 1:
        return [[each] for each in instances]
    there = {each.incarnation: each for each in instances}
    whole = [group for group in known if len(group) == hosts and {*group} <= there.keys()]
    groups = [[there[who] for who in group] for group in whole]
    taken = {each.incarnation for group in groups for each in group}
    open_groups: list[list[Member]] = []
    for instance in instances:
        if instance.incarnation in taken:
            continue
        fitting = (group for group in open_groups if instance.host not in {each.host for each in group})
        group = next(fitting, None)
        if group is None:
            open_groups.append(group := [])
        group.append(instance)
        if len(group) == hosts:
            open_groups.remove(group)
            groups.append(group)
    return groups
