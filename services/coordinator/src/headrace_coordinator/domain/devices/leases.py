"""Leases as a pure reducer: who may use which device, under which epoch.

`plan_*` functions look at a table and say which events follow; `LeaseTable.apply` folds events. `now` is the wall
clock, for the events alone; renewals and deadlines are volatile, on another clock, and live with the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from headrace_schema.gpu_defaults import asleep_limit
from headrace_schema.rules.acting import PART_ERROR

from headrace_coordinator.domain import events as ev

KEPT_BYTES = 256 * 2**20
"""Bytes that a process may still use of a GPU that it has released: small buffers of its libraries."""
HELP, DECODE = "help", "decode"
"""Stages of the leases within a step: of a trainer that helps, and of a rollout that decodes on trainers' devices."""
BUILT_IN = "transformers"
"""The engine that computes in its instance's own process."""
GENERATE = "generate"
SIMULATE, SCORE = "simulate", "score"
"""Stages of leases that simulators and scorers hold while the run's rollouts hold theirs."""
GRANTED, HELD, REVOKING = "GRANTED", "HELD", "REVOKING"


class Lease(msgspec.Struct):
    """A live lease."""

    epoch: int
    incarnation: str
    run: str
    stage: str
    devices: list[str]
    state: str = GRANTED
    host: str = ""
    boot_id: str = ""
    since: float = 0.0
    memory_part: float = 1.0
    """Share of each device's memory; below 1, others of the run may hold the rest."""


class Quarantine(msgspec.Struct):
    """A device whose last holder is not proven gone."""

    incarnation: str
    reason: str
    host: str = ""
    boot_id: str = ""
    """Names the holder's machine since it was started; empty where it did not say."""


class Evidence(msgspec.Struct, frozen=True):
    """What is known of a device in quarantine, where nobody has seen its last holder end."""

    holder_stopped: bool
    """A lease lifetime has passed since the lease ended, in which this coordinator heard whoever could be heard."""
    used: int | None = None
    """Bytes of a GPU in use by anybody, measured after the holder had stopped; None: nobody has measured it."""
    holders_boot: str = ""
    boots: frozenset[str] = frozenset()
    """Boot ids of living instances that see the device and have been heard for as long as a measurement takes."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """Devices wanted by one instance for one stage of a run."""

    incarnation: str
    run: str
    stage: str
    devices: tuple[str, ...]
    host: str = ""
    """Where the instance runs: whose supervisor can prove its end."""
    boot_id: str = ""
    memory_part: float = 1.0
    """Share of each device's memory; requests of one run whose shares fit may have the same device."""


class Blocked(Exception):
    """A request that cannot be granted now; the message says what is waited for and who holds it."""


class LeaseTable(msgspec.Struct):
    """All leases and quarantined devices, and the highest epoch ever minted."""

    leases: dict[int, Lease] = {}
    quarantined: dict[str, Quarantine] = {}
    last_epoch: int = 0

    def holders_of(self, device: str) -> list[Lease]:
        """The leases that cover a device: one, or those that hold parts of its memory."""
        return [lease for lease in self.leases.values() if device in lease.devices]

    def holders_on(self, host: str) -> set[str]:
        """Processes of a host that hold a lease or have a device in quarantine."""
        held = {lease.incarnation for lease in self.leases.values() if lease.host == host}
        return held | {each.incarnation for each in self.quarantined.values() if each.host == host}

    def of(self, incarnation: str) -> list[Lease]:
        """Leases of one process."""
        return [lease for lease in self.leases.values() if lease.incarnation == incarnation]

    def apply(self, event: ev.Event) -> None:
        """Folds one event; events of other parts are ignored."""
        match event:
            case ev.CoordinatorStarted(leap=leap):
                self.last_epoch += leap
            case ev.LeaseGranted():
                self.last_epoch = max(self.last_epoch, event.epoch)
                self.leases[event.epoch] = Lease(
                    event.epoch,
                    event.incarnation,
                    event.run,
                    event.stage,
                    list(event.devices),
                    host=event.host,
                    boot_id=event.boot_id,
                    since=event.at,
                    memory_part=event.memory_part,
                )
            case ev.LeaseHeld():
                if (lease := self.leases.get(event.epoch)) and lease.state == GRANTED:
                    lease.state = HELD
            case ev.LeaseRevoking():
                if lease := self.leases.get(event.epoch):
                    lease.state = REVOKING
            case ev.LeaseEnded():
                self._end(event)
            case ev.DeviceFreed(device=device):
                self.quarantined.pop(device, None)
            case ev.InstanceLost(proven=True):
                self.quarantined = {
                    device: q for device, q in self.quarantined.items() if q.incarnation != event.incarnation
                }

    def _end(self, event: ev.LeaseEnded) -> None:
        lease = self.leases.pop(event.epoch, None)
        if lease is None:
            return
        for device in lease.devices if not event.proven else ():
            self.quarantined[device] = Quarantine(lease.incarnation, event.cause, lease.host, lease.boot_id)


def plan_grant(table: LeaseTable, requests: Iterable[LeaseRequest]) -> list[ev.LeaseGranted]:
    """All of `requests` or none: raises `Blocked` naming each busy device and its holder."""
    requests = list(requests)
    wanted = {device for request in requests for device in request.devices}
    problems = [why for device in sorted(wanted) if (why := _busy(table, device, requests))]
    if problems:
        raise Blocked("; ".join(problems))
    return [
        ev.LeaseGranted(
            epoch=table.last_epoch + 1 + index,
            incarnation=request.incarnation,
            run=request.run,
            stage=request.stage,
            devices=list(request.devices),
            host=request.host,
            boot_id=request.boot_id,
            memory_part=request.memory_part,
        )
        for index, request in enumerate(requests)
    ]


def _busy(table: LeaseTable, device: str, requests: Sequence[LeaseRequest]) -> str:
    """Why a device cannot be given to those who want it; empty: it can."""
    if quarantine := table.quarantined.get(device):
        return f"{device} is quarantined: {quarantine.incarnation} is not proven gone ({quarantine.reason})"
    wanting = [request for request in requests if device in request.devices]
    held = table.holders_of(device)
    if sum(each.memory_part for each in wanting) > 1 + PART_ERROR:
        return f"{device} is wanted twice"
    others = any(lease.run != request.run for lease in held for request in wanting)
    taken = sum(lease.memory_part for lease in held) + sum(request.memory_part for request in wanting)
    if held and (others or taken > 1 + PART_ERROR):
        return f"{device} is held by " + " and ".join(
            f"{lease.incarnation} for {lease.run} {lease.stage} (epoch {lease.epoch})" for lease in held
        )
    return ""


def plan_held(table: LeaseTable, epoch: int, incarnation: str) -> list[ev.Event]:
    """A holder's acknowledgement; a stale one changes nothing (G4)."""
    lease = table.leases.get(epoch)
    if lease is None or lease.incarnation != incarnation or lease.state != GRANTED:
        return []
    return [ev.LeaseHeld(epoch=epoch)]


def plan_release(
    table: LeaseTable,
    epoch: int,
    incarnation: str,
    cause: str,
    *,
    used: int = 0,
    expected: int = KEPT_BYTES,
) -> list[ev.LeaseEnded]:
    """A holder's own release; only the holder can end its lease this way (G4).

    A GPU on which it still uses more than `expected` bytes is not free: it is quarantined, with the figure. On
    a CPU the figure is the resident set, most of which is not the lease's.
    """
    lease = table.leases.get(epoch)
    if lease is None or lease.incarnation != incarnation:
        return []
    if used > expected and any(is_gpu(device) for device in lease.devices):
        cause = f"{cause}, but {used / 2**20:.0f} MiB are still in use there and {expected / 2**20:.0f} are planned"
        return [ev.LeaseEnded(epoch=epoch, cause=cause, proven=False)]
    return [ev.LeaseEnded(epoch=epoch, cause=cause, proven=True)]


def kept_bytes(lease: Lease, engine: str, memory: Mapping[str, int]) -> int:
    """Bytes that a lease's holder may still use of its GPUs once it has released them.

    `engine`: of the lease's run; the separate processes of some sleep. `memory`: bytes of GPUs, where they are known.
    """
    if engine == BUILT_IN or lease.stage not in (GENERATE, DECODE):
        return KEPT_BYTES
    return sum(asleep_limit(memory.get(device, 0)) for device in lease.devices)


def is_gpu(device: str) -> bool:
    """Whether a device name is a GPU's, "GPU-8f2a/gpu:0"."""
    return device.rpartition("/")[2].startswith("gpu:")


def all_gpus(devices: Sequence[str]) -> bool:
    """Whether there are devices and all are GPUs: engines and ranks then hold only those that they compute on."""
    return bool(devices) and all(map(is_gpu, devices))


def plan_revoke(table: LeaseTable, epoch: int) -> list[ev.Event]:
    """Asks a holder to release."""
    lease = table.leases.get(epoch)
    if lease is None or lease.state == REVOKING:
        return []
    return [ev.LeaseRevoking(epoch=epoch)]


def plan_expire(
    table: LeaseTable,
    renewed_at: Mapping[int, float],
    release_by: Mapping[int, float],
    ttl: float,
    now: float,
) -> list[ev.LeaseEnded]:
    """Leases not renewed for a TTL, and revoked ones past their deadline: over, devices quarantined.

    `renewed_at`, `release_by` and `now` are on one clock.
    """
    expired = []
    for lease in table.leases.values():
        if now - renewed_at.get(lease.epoch, now) > ttl:
            expired.append(ev.LeaseEnded(epoch=lease.epoch, cause="not renewed", proven=False))
        elif lease.state == REVOKING and now > release_by.get(lease.epoch, now):
            expired.append(ev.LeaseEnded(epoch=lease.epoch, cause="revoked past notice", proven=False))
    return expired


def plan_exit(table: LeaseTable, incarnation: str) -> list[ev.Event]:
    """A process is proven gone: its leases are over and its devices free."""
    return [
        ev.LeaseEnded(epoch=lease.epoch, cause="process exited", proven=True)
        for lease in table.of(incarnation)
    ]


def proof_of_free(device: str, evidence: Evidence) -> str:
    """Why a device in quarantine is free although nobody has seen its last holder end; empty: nothing proves it yet.

    A holder that hears nothing stops by its own clock within one lease lifetime, so nothing is proven before. A CPU
    slot, of which it keeps nothing, is free then. A GPU is free once nobody uses its memory. Where nobody can measure
    that, it is free once its machine has been started again: all that see it have another boot id than the holder
    had. One that has the same contradicts that: sandboxes with kernels of their own may share a GPU.

    That a process id is gone proves nothing: a container has ids of its own, and cannot see another one's.
    """
    if not evidence.holder_stopped:
        return ""
    if not is_gpu(device):
        return "its holder has stopped by its own clock: one lease lifetime has passed"
    if evidence.used is not None:
        used = f"{evidence.used / 2**20:.0f} MiB are in use"
        return f"nobody uses it: {used}" if evidence.used <= KEPT_BYTES else ""
    boots = evidence.boots - {""}
    if evidence.holders_boot and boots and evidence.holders_boot not in boots:
        return "its machine has been started again"
    return ""


def why_not_released(device: str, holder: str, *, alive: bool, supervised: bool) -> str:
    """Why a person's word does not end a device's quarantine: its last holder, `holder`, is there; else empty."""
    if not (alive or supervised):
        return ""
    seen = "is connected" if alive else "is a process that a connected supervisor runs"
    return (
        f"{holder}, which held {device} last, {seen}; end it first (headrace drain {holder}, or kill the process): "
        "the device is then free by itself"
    )
