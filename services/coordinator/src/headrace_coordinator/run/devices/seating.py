"""Which devices each rollout and trainer of a run has: a placement's sides, divided between their members.

Knows no lease and no step: the section, the granted devices and the members come with the question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from headrace_schema.sections.running import APART, PlacementSection

from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.places import devices_seen, hosts_of, machines, named_devices
from headrace_coordinator.run.workers.clients import WorkerClient


class PlacementError(Exception):
    """The spec's placement does not fit the fleet; the message names key and fix."""


def default_devices(
    section: PlacementSection,
    granted: Sequence[str],
    rollouts: Sequence[WorkerClient],
    trainers: Sequence[WorkerClient],
    *,
    joined: bool = False,
) -> dict[tuple[str, str], list[str]]:
    """Devices by (kind, machine), of those granted to the run: the spec's, else all (collocated) or a half each.

    `joined`: the trainers have the rollouts' too.
    """
    chosen: dict[tuple[str, str], list[str]] = {}
    for machine, members in by_machine((*rollouts, *trainers)).items():
        hosts = hosts_of(member.instance for member in members)
        generates = devices_seen(m.instance for m in members if m.instance.kind == "rollout")
        learns = devices_seen(m.instance for m in members if m.instance.kind == "trainer")
        # What only one kind can use lies on its side.
        everything = [device for device in granted if device in generates | learns]
        everything.sort(key=lambda device: (device in learns) - (device in generates))
        trainer_side, rollout_side = list(everything), list(everything)
        if section.mode == "collocated" and section.resident and any(map(is_gpu, everything)):
            raise PlacementError(
                "placement.memory: resident keeps both sides in the memory of the same devices, and on GPUs an engine "
                "takes what it finds there; use offloaded"
            )
        if section.mode in APART and generates and learns:
            if len(everything) < 2:
                raise PlacementError(
                    f"placement.mode: {section.mode} needs two devices on {machine}, which has {everything}; "
                    "use collocated"
                )
            if section.mode == "hybrid" and any(map(is_gpu, everything)):
                raise PlacementError(
                    "placement.mode: hybrid gives one rank several devices, and on GPUs a rank computes on one; "
                    "use disaggregated, or collocated with trainer.helpers"
                )
            generate = sum(m.instance.kind == "rollout" for m in members)
            learn = len(members) - generate
            half = min(max(len(everything) // 2, learn), max(1, len(everything) - generate))
            rollout_side, trainer_side = everything[:-half], everything[-half:]
        for kind, names, side, usable in (
            ("rollout", section.rollout, rollout_side, generates),
            ("trainer", section.trainer, trainer_side, learns),
        ):
            found = _named(names, everything, machine, kind, hosts) if names else side
            chosen[kind, machine] = [device for device in found if device in usable]
        if joined:
            own = chosen["trainer", machine]
            own += [d for d in chosen["rollout", machine] if d in learns and d not in own]
    return chosen


def _named(
    names: Sequence[str], everything: Sequence[str], machine: str, kind: str, hosts: Mapping[str, set[str]]
) -> list[str]:
    missing = [name for name in names if "/" not in name and not named_devices([name], everything)]
    if missing:
        raise PlacementError(
            f"placement.{kind}: {', '.join(missing)} does not exist; {machine} has {', '.join(everything)}"
        )
    found = [device for name in names for device in named_devices([name], everything, hosts)]
    return list(dict.fromkeys(found))


def by_machine(
    members: Sequence[WorkerClient], everybody: Sequence[WorkerClient] | None = None
) -> dict[str, list[WorkerClient]]:
    """`members` by machine; `everybody` decides which hosts are one machine, whose name is the same for each kind."""
    machine_of = machines(member.instance for member in everybody or members)
    groups: dict[str, list[WorkerClient]] = defaultdict(list)
    for member in members:
        groups[machine_of[member.incarnation]].append(member)
    return groups


def seat(members: Sequence[WorkerClient], devices: Sequence[str], seats: int, key: str) -> None:
    """Divides `devices` into seats; members that hold a lease keep theirs where the others find room beside it."""
    if len(devices) < seats:
        raise PlacementError(
            f"{key}: {seats} instances share {len(devices)} devices ({', '.join(devices)}); "
            "use fewer instances or name more devices"
        )
    kept = [member for member in members if member.lease_epoch]
    taken = [device for member in kept for device in member.devices]
    free = [device for device in devices if device not in taken]
    if set(taken) - set(devices) or len(free) < len(members) - len(kept):
        kept, free = [], list(devices)  # Their leases are exchanged when the others take theirs.
    others = [member for member in members if member not in kept]
    chunks = _chunks(free, max(seats - len(kept), len(others), 1))
    for member in others:
        own = next((chunk for chunk in chunks if set(chunk) <= set(member.instance.devices)), None)
        if own is None:
            raise PlacementError(
                f"{key}: {member.instance.instance} sees {', '.join(member.instance.devices)} and none of the "
                f"devices that are left for it ({'; '.join(', '.join(chunk) for chunk in chunks)}); "
                "name devices that it sees"
            )
        chunks.remove(own)
        # An engine and a rank compute on one GPU: what it would not touch, it does not hold.
        member.devices = own[:1] if is_gpu(own[0]) else own


def _chunks(devices: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """At most `count` parts of nearly equal size, none empty."""
    share, extra = divmod(len(devices), min(count, len(devices)) or 1)
    stops = [(index + 1) * share + min(index + 1, extra) for index in range(min(count, len(devices)))]
    return [tuple(devices[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]
