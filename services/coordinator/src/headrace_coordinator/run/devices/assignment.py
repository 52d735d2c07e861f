"""Which devices each worker of a run is to have: those of its side, divided between the workers of that side.

Knows no step, and takes and releases no lease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from math import ceil

from headrace_schema.spec import RunSpec

from headrace_coordinator.domain.devices.demand import devices_each
from headrace_coordinator.domain.devices.leases import all_gpus, is_gpu
from headrace_coordinator.domain.devices.placement import Placement
from headrace_coordinator.domain.devices.places import (
    device_order,
    devices_seen,
    hosts_of,
    machines,
    named_devices,
)
from headrace_coordinator.fleet.instance_client import WorkerClient
from headrace_coordinator.run.workers.group import WorkerGroup

SEVERAL = "rollout.engine_options.tensor_parallel_size, own_devices"
"""What gives a rollout instance more devices than one."""


class PlacementError(Exception):
    """The spec's placement does not fit the fleet; the message names key and fix."""


def assign_devices(workers: WorkerGroup, beside: set[str], *, joined: bool) -> None:
    """Sets the `devices` of rollouts and trainers; raises `PlacementError`.

    `beside`: devices of the run's simulators and scorers. `joined`: the trainers have these and the rollouts' too.
    """
    spec, grant = workers.spec, workers.grant
    rollouts = [worker for worker in workers.rollouts if worker.incarnation in grant.rollouts]
    trainers = [worker for worker in workers.trainers if worker.incarnation in grant.trainers]
    devices_of = default_devices(workers.placement, grant.devices, rollouts, trainers, spec, joined=joined)
    for kind, side_workers, wanted in (
        ("rollout", rollouts, spec.rollout.instances),
        ("trainer", trainers, workers.ranks),
    ):
        groups = by_machine(side_workers, (*rollouts, *trainers))
        for machine, group in groups.items():
            side = devices_of[kind, machine]
            if kind == "rollout":
                side = [device for device in side if device not in beside]
            elif joined:
                more = beside & devices_seen(worker.instance for worker in group) - {*side}
                others = {*devices_of.get(("rollout", machine), ()), *beside}
                side = sorted([*side, *sorted(more, key=device_order)], key=others.__contains__)
            each = devices_each(spec, side) if kind == "rollout" else 1
            seat(group, side, _seats(group, side, wanted, groups, each), f"placement.{kind}", each)


def _seats(group: Sequence[WorkerClient], side: Sequence[str], wanted: int, groups: Sized, each: int) -> int:
    """Parts of a side's devices on a machine; a lost worker's is kept if possible, so that the others need not move."""
    return max(len(group), min(ceil(wanted / len(groups)), len(side) // each))


def default_devices(
    placement: Placement,
    granted: Sequence[str],
    rollouts: Sequence[WorkerClient],
    trainers: Sequence[WorkerClient],
    spec: RunSpec | None = None,
    *,
    joined: bool = False,
) -> dict[tuple[str, str], list[str]]:
    """Devices by (kind, machine), of those granted to the run: the spec's, else all (collocated) or a half each.

    `joined`: the trainers have the rollouts' too. `spec`: says how many a rollout needs; left out: one.
    """
    chosen: dict[tuple[str, str], list[str]] = {}
    section = placement.section
    for machine, workers in by_machine((*rollouts, *trainers)).items():
        hosts = hosts_of(worker.instance for worker in workers)
        generates = devices_seen(w.instance for w in workers if w.instance.kind == "rollout")
        learns = devices_seen(w.instance for w in workers if w.instance.kind == "trainer")
        # What only one kind can use lies on its side.
        everything = [device for device in granted if device in generates | learns]
        everything.sort(key=lambda device: (device in learns) - (device in generates))
        trainer_side, rollout_side = list(everything), list(everything)
        if placement.turns and placement.resident and any(map(is_gpu, everything)):
            raise PlacementError(
                "placement.memory: resident keeps both sides in the memory of the same devices, and on GPUs an engine "
                "takes what it finds there; use offloaded"
            )
        if placement.apart and generates and learns:
            if len(everything) < 2 and not placement.spans:
                raise PlacementError(
                    f"placement.mode: {section.mode} needs two devices on {machine}, which has {everything}; "
                    "add one, or use collocated, which takes algorithm.max_staleness: 0 alone"
                )
            generate = sum(w.instance.kind == "rollout" for w in workers)
            learn = len(workers) - generate
            generate *= devices_each(spec, everything) if spec else 1
            fewest = 0 if placement.spans else 1
            first = len(everything) - min(
                max(len(everything) // 2, learn), max(fewest, len(everything) - generate)
            )
            rollout_side, trainer_side = everything[:first], everything[first:]
        for kind, names, side, usable in (
            ("rollout", section.rollout, rollout_side, generates),
            ("trainer", section.trainer, trainer_side, learns),
        ):
            found = _named(names, everything, machine, kind, hosts) if names else side
            chosen[kind, machine] = [device for device in found if device in usable]
            if kind == "rollout":
                shared = [device for device in found if device in learns]  # Also where no rollout is.
        if joined:
            own = chosen["trainer", machine]
            own += [device for device in shared if device not in own]
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
    workers: Sequence[WorkerClient], everybody: Sequence[WorkerClient] | None = None
) -> dict[str, list[WorkerClient]]:
    """Workers by machine; `everybody` decides which hosts are one machine, whose name is the same for each kind."""
    machine_of = machines(worker.instance for worker in everybody or workers)
    groups: dict[str, list[WorkerClient]] = defaultdict(list)
    for worker in workers:
        groups[machine_of[worker.incarnation]].append(worker)
    return groups


def seat(
    workers: Sequence[WorkerClient], devices: Sequence[str], seats: int, key: str, each: int = 1
) -> None:
    """Divides `devices` into seats; workers that hold a lease keep theirs where the others find room beside it.

    `each`: how many a worker needs. Of GPUs it gets the first that it sees; CPU slots are divided among all.
    """
    if each > 1 and len(devices) < seats * each:
        raise PlacementError(
            f"{key}: {seats} instances of {each} devices each ({SEVERAL}) need "
            f"{seats * each} and there are {len(devices)} ({', '.join(devices)}); use fewer instances or a smaller "
            "tensor_parallel_size, or name more devices"
        )
    if len(devices) < seats:
        raise PlacementError(
            f"{key}: {seats} instances share {len(devices)} devices ({', '.join(devices)}); "
            "use fewer instances or name more devices"
        )
    kept = [worker for worker in workers if worker.lease_epoch]
    taken = [device for worker in kept for device in worker.devices]
    free = [device for device in devices if device not in taken]
    if set(taken) - set(devices) or len(free) < (len(workers) - len(kept)) * each:
        kept, free = [], list(devices)  # Their leases are exchanged when the others take theirs.
    others = [worker for worker in workers if worker not in kept]
    if all_gpus(devices):
        _seat_on_gpus(others, free, each, key)
        return
    chunks = _chunks(free, max(seats - len(kept), len(others), 1))
    for worker in others:
        own = next((chunk for chunk in chunks if set(chunk) <= set(worker.instance.devices)), None)
        if own is None:
            raise PlacementError(
                f"{key}: {worker.instance.instance} sees {', '.join(worker.instance.devices)} and none of the "
                f"devices that are left for it ({'; '.join(', '.join(chunk) for chunk in chunks)}); "
                "name devices that it sees"
            )
        chunks.remove(own)
        worker.devices = own


def _seat_on_gpus(workers: Sequence[WorkerClient], devices: Sequence[str], each: int, key: str) -> None:
    """Gives each worker the first `each` devices that are left and that it sees."""
    left = list(devices)
    for worker in workers:
        own = [device for device in left if device in worker.instance.devices][:each]
        if len(own) < each:
            what, fix = "a GPU", ""
            if each > 1:
                what, fix = f"an instance of {each} GPUs ({SEVERAL})", ", or use a smaller size"
            raise PlacementError(
                f"{key}: {what} is wanted and {worker.instance.instance} sees {len(own)} of those that are left for it "
                f"({', '.join(left)}); let it see more (CUDA_VISIBLE_DEVICES, --gpus, --devices){fix}"
            )
        left = [device for device in left if device not in own]
        worker.devices = tuple(own)


def _chunks(devices: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """At most `count` parts of nearly equal size, none empty."""
    share, extra = divmod(len(devices), min(count, len(devices)) or 1)
    stops = [(index + 1) * share + min(index + 1, extra) for index in range(min(count, len(devices)))]
    return [tuple(devices[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]
