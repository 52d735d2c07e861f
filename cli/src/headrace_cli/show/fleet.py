"""Tables of instances, devices and leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace_cli.output import state_text, table

if TYPE_CHECKING:
    from headrace.client import Instance, Lease, Leases
    from rich.table import Table


NARROW, WIDE = 80, 92
"""Columns below which a table leaves out what is least asked for, and from which addresses fit beside all else."""


def instances_table(instances: Sequence[Instance], coordinator: str = "", width: int = NARROW) -> Table:
    """Service, instance, state, address, devices, memory, busy cores; on narrow terminals without some of it."""
    own = [("coordinator", "coordinator", state_text("READY"), coordinator.partition("://")[2], "", "", "")]
    rows = [
        (
            item.kind,
            short_name(item.name),
            state_text(item.state),
            item.address,
            _devices(item.devices),
            _memory(item),
            f"{item.busy_cores:.1f}",
        )
        for item in sorted(instances, key=lambda item: (item.kind, item.name))
    ]
    headers = ("service", "instance", "state", "address", "devices", ">memory", ">cores")
    left_out = {"address"} if NARROW <= width < WIDE else {"address", "service"} if width < NARROW else set()
    shown = [place for place, header in enumerate(headers) if header not in left_out]
    every = [*(own if coordinator else []), *rows]
    return table([headers[i] for i in shown], [[row[i] for i in shown] for row in every])


def hosts_of(instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """Hosts by name, with their instances and devices."""
    found: dict[str, dict[str, Any]] = {}
    for item in sorted(instances, key=lambda item: item.name):
        host = found.setdefault(item.host, {"host": item.host, "instances": [], "devices": []})
        host["instances"].append(short_name(item.name))
        host["devices"] = sorted({*host["devices"], *item.devices})
    return [found[name] for name in sorted(found)]


def hosts_table(hosts: Sequence[dict[str, Any]]) -> Table:
    """Host, instances, devices."""
    rows = [(each["host"], ", ".join(each["instances"]), _devices(each["devices"])) for each in hosts]
    return table(["host", "instances", "devices"], rows)


def isolation_lines(instances: Sequence[Instance]) -> list[str]:
    """What is not held of users' code, and at which instances; a line for each."""
    where: dict[str, list[str]] = {}
    for item in sorted(instances, key=lambda item: item.name):
        for text in item.capabilities.get("not_held", ()):
            where.setdefault(text, []).append(short_name(item.name))
    return [f"not held: {text} ({', '.join(names)}); see SECURITY.md" for text, names in where.items()]


def instance_document(instance: Instance, pids: Mapping[str, int], *, schemas: bool) -> dict[str, Any]:
    """An instance as JSON, with its process id where that is known; without `schemas` capabilities are names alone."""
    document = dict(instance.raw)
    if (pid := pids.get(short_name(instance.name))) is not None:
        document["pid"] = pid
    if not schemas:
        document["capabilities"] = {
            kind: [text.partition("=")[0] for text in texts] for kind, texts in instance.capabilities.items()
        }
    return document


def devices_table(leases: Leases, width: int = NARROW) -> Table:
    """Each device with its holder and what it does; on a narrow terminal without the host's name."""
    stages: dict[str, list[str]] = {}
    for lease in leases.leases:
        for device in lease.devices:
            stages.setdefault(device, []).append(lease.stage)
    rows = [
        (
            item.name if width >= NARROW else short_name(item.name),
            state_text(item.state),
            ", ".join(map(short_name, item.holder.split(", "))),
            ", ".join(stages.get(item.name, ())),
            item.reason,
        )
        for item in leases.devices
    ]
    return table(("device", "state", "holder", "stage", "why"), rows)


def leases_table(leases: Sequence[Lease]) -> Table:
    """Leases with their epochs."""
    rows = [
        (
            item.epoch,
            state_text(item.state),
            short_name(item.instance),
            short_name(item.run),
            item.stage,
            _devices(item.devices),
            f"{item.expires_in_s:.0f} s",
        )
        for item in leases
    ]
    return table((">epoch", "state", "instance", "run", "stage", "devices", ">expires in"), rows)


def short_name(name: str) -> str:
    """The last part of a resource name."""
    return name.rpartition("/")[2]


def _devices(names: Sequence[str]) -> str:
    return " ".join(short_name(name) for name in names)


def _memory(instance: Instance) -> str:
    return f"{instance.resident_memory_bytes / 2**20:,.0f} MiB" if instance.resident_memory_bytes else ""
