"""Which instances share a machine, and which devices a spec's short names mean. Knows no run and no lease.

Two containers have different hosts and may see the same devices: they are on one machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def named_devices(names: Sequence[str], devices: Sequence[str]) -> list[str]:
    """Those of `devices` that `names` mean, in full or by their last part ("cpu:0")."""
    found = [d for d in devices if any(d == name or d.endswith(f"/{name}") for name in names)]
    return list(dict.fromkeys(found))


def device_order(device: str) -> tuple[str, int, str]:
    """Sorts device names by their index: cpu:2 comes before cpu:10."""
    stem, _, index = device.rpartition(":")
    return (stem, int(index), "") if index.isdigit() else (device, 0, "")
