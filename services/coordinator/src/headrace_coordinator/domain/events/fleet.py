"""Events of the coordinator and its fleet: instances, leases, writes with a key; and of who may use it."""

from __future__ import annotations

from headrace_coordinator.domain.events.base import Event


class CoordinatorStarted(Event, frozen=True, kw_only=True):
    """A coordinator opened the store; counters leap, so that no number that was lost can be issued twice."""

    epoch: int
    store_id: str
    leap: int


class EpochRaised(Event, frozen=True, kw_only=True):
    """An instance or a checkpoint knew a higher coordinator epoch than the store."""

    epoch: int


class InstanceRegistered(Event, frozen=True, kw_only=True):
    """A process registered."""

    instance: str
    incarnation: str
    kind: str
    host: str
    address: str
    devices: list[str]
    capabilities: dict[str, list[str]]
    boot_id: str = ""


class InstanceDraining(Event, frozen=True, kw_only=True):
    """A process was told to stop; it gets no new work."""

    incarnation: str


class InstanceLost(Event, frozen=True, kw_only=True):
    """A process is gone, or was not heard of for a lease's lifetime; `proven` when its exit was seen."""

    incarnation: str
    reason: str
    proven: bool


class LeaseGranted(Event, frozen=True, kw_only=True):
    """Devices were leased to an instance under a new epoch."""

    epoch: int
    incarnation: str
    run: str
    stage: str
    devices: list[str]
    host: str = ""
    boot_id: str = ""
    memory_part: float = 1.0


class LeaseHeld(Event, frozen=True, kw_only=True):
    """The holder has taken its memory."""

    epoch: int


class LeaseRevoking(Event, frozen=True, kw_only=True):
    """The holder was asked to release it; the lease manager knows by when, on its own clock."""

    epoch: int


class LeaseEnded(Event, frozen=True, kw_only=True):
    """A lease is over; its devices are free when `proven`, else in quarantine."""

    epoch: int
    cause: str
    proven: bool


class DeviceFreed(Event, frozen=True, kw_only=True):
    """A device left quarantine; `author` is "system", or "user" for a person's word."""

    device: str
    holder: str
    cause: str
    author: str = "system"


class KeyUsed(Event, frozen=True, kw_only=True):
    """An HTTP write was accepted under an idempotency key."""

    key: str
    body: str
    resource: str


class TokenCreated(Event, frozen=True, kw_only=True):
    """An admin made a token; `digest` is the SHA-256 of its secret, which is nowhere."""

    name: str
    digest: str
    owner: str
    team: str
    scopes: list[str]
    expires_at: float = 0.0
    """0: it does not expire."""


class TokenRevoked(Event, frozen=True, kw_only=True):
    """An admin revoked a token: it opens nothing any more, and what it has open ends."""

    name: str


class RunShared(Event, frozen=True, kw_only=True):
    """A run's owner changed who sees it: private, team or fleet."""

    run: str
    visibility: str


class QuotaSet(Event, frozen=True, kw_only=True):
    """An admin set what a user or team may use, in place of what was set before; nothing at all: no quota."""

    subject: str
    limits: dict[str, float]
