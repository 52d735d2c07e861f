"""The holder's side of leases as a pure reducer: (state, event) -> (state, effects). Knows no clock, no wire.

A lease's own deadline counts from *sending* the last acknowledged renewal, less a margin: the coordinator got
that renewal later and counts a longer time, so the holder always stops first, whatever the network does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from headrace.common.v1 import common_pb2

MARGIN_S = 5.0
_REMEMBERED = 64


def margin(ttl_s: float) -> float:
    """Seconds by which the holder stops before the coordinator's timer; a sixth of short TTLs."""
    return min(MARGIN_S, ttl_s / 6)


class Phase(Enum):
    """Where a lease stands with its holder."""

    ACQUIRING = "acquiring"
    """Granted; the resources are being taken."""
    HELD = "held"
    """In use."""
    QUIESCED = "quiesced"
    """The own deadline has passed: nothing new starts, memory is kept, a renewal brings it back."""
    RELEASING = "releasing"
    """Being released; valid until it is."""


@dataclass(frozen=True)
class Holding:
    """One lease; `deadline` on the injected clock; `release_notice_s` is set when a revoke waits for the grant."""

    lease: common_pb2.Lease
    phase: Phase
    deadline: float
    release_notice_s: float | None = None
    release_keeping: bool = False


@dataclass(frozen=True)
class Memory:
    """What a release measured on its devices: what is free, and what this process still uses (on a CPU its
    resident set)."""

    free_bytes: int = 0
    used_bytes: int = 0


@dataclass(frozen=True)
class LeaseState:
    """All leases of one instance. `anchor` is when the last message known to have arrived was sent."""

    holdings: dict[int, Holding] = field(default_factory=dict)
    anchor: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)
    released: dict[int, Memory] = field(default_factory=dict)
    default_ttl_s: float = 30.0

    def held(self) -> list[common_pb2.Lease]:
        """Leases whose devices this instance has or is taking."""
        return [holding.lease for holding in self.holdings.values()]

    def epochs(self) -> list[int]:
        """Epochs to renew."""
        return sorted(self.holdings)

    def next_deadline(self) -> float | None:
        """When the next lease in use reaches its own deadline."""
        return min((h.deadline for h in self.holdings.values() if h.phase is Phase.HELD), default=None)


# Events


@dataclass(frozen=True)
class SessionOpened:
    """Register was answered; `sent_at` is when it was sent."""

    sent_at: float
    lease_ttl_s: float
    stale_epochs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Granted:
    """The coordinator gives a lease."""

    lease: common_pb2.Lease


@dataclass(frozen=True)
class Acquired:
    """The instance has taken the lease's resources, or says why it cannot."""

    epoch: int
    refusal: str = ""


@dataclass(frozen=True)
class HeartbeatSent:
    """A heartbeat with all epochs goes out."""

    sequence: int
    at: float


@dataclass(frozen=True)
class HeartbeatAcked:
    """The coordinator answered a heartbeat."""

    sequence: int
    at: float
    renewed: tuple[int, ...] = ()
    stale: tuple[int, ...] = ()


@dataclass(frozen=True)
class Revoked:
    """The coordinator wants a lease back; `keep`: what is loaded may stay."""

    epoch: int
    notice_s: float
    keep: bool = False


@dataclass(frozen=True)
class Released:
    """The instance has given the resources back."""

    epoch: int
    memory: Memory


@dataclass(frozen=True)
class Tick:
    """Time passes."""

    at: float


Event = SessionOpened | Granted | Acquired | HeartbeatSent | HeartbeatAcked | Revoked | Released | Tick

# Effects


@dataclass(frozen=True)
class Acquire:
    """Take the lease's resources, then say Acquired."""

    lease: common_pb2.Lease


@dataclass(frozen=True)
class Hold:
    """The fence admits the lease until `deadline`."""

    epoch: int
    deadline: float


@dataclass(frozen=True)
class Quiesce:
    """Start nothing new under the lease; keep the memory."""

    epoch: int


@dataclass(frozen=True)
class Release:
    """Reach a safe point within the notice, give the resources back (`keep`: all but memory), then say Released."""

    epoch: int
    notice_s: float
    keep: bool = False


@dataclass(frozen=True)
class Drop:
    """The fence refuses the lease from now on."""

    epoch: int


@dataclass(frozen=True)
class TellHeld:
    """Tell the coordinator that the lease is held, or why not."""

    epoch: int
    refusal: str = ""


@dataclass(frozen=True)
class TellReleased:
    """Tell the coordinator that the lease is released."""

    epoch: int
    memory: Memory


Effect = Acquire | Hold | Quiesce | Release | Drop | TellHeld | TellReleased
Step = tuple[LeaseState, list[Effect]]


def reduce(state: LeaseState, event: Event) -> Step:
    """The next state, and what has to be done about it, in order."""
    match event:
        case SessionOpened():
            opened = replace(state, anchor=event.sent_at, sent={}, default_ttl_s=event.lease_ttl_s)
            return _stale(opened, event.stale_epochs)
        case Granted():
            return _granted(state, event.lease)
        case Acquired():
            return _acquired(state, event)
        case HeartbeatSent():
            return replace(state, sent={**state.sent, event.sequence: event.at}), []
        case HeartbeatAcked():
            return _acked(state, event)
        case Revoked():
            return _revoked(state, event)
        case Released():
            return _released(state, event)
        case Tick():
            return _tick(state, event.at)


def _granted(state: LeaseState, lease: common_pb2.Lease) -> Step:
    known = state.holdings.get(lease.epoch)
    if known is not None:
        repeated = known.phase in (Phase.HELD, Phase.QUIESCED)
        return state, [TellHeld(lease.epoch)] if repeated else []
    if lease.epoch in state.released:
        return state, [TellHeld(lease.epoch, "this lease was already released")]
    holding = Holding(lease, Phase.ACQUIRING, state.anchor + _usable(state, lease))
    return _with(state, holding), [Acquire(lease)]


def _acquired(state: LeaseState, event: Acquired) -> Step:
    holding = state.holdings.get(event.epoch)
    if holding is None or holding.phase is not Phase.ACQUIRING:
        return state, []
    if event.refusal:
        return _without(state, event.epoch), [Drop(event.epoch), TellHeld(event.epoch, event.refusal)]
    if holding.release_notice_s is not None:
        releasing = replace(holding, phase=Phase.RELEASING)
        release = Release(event.epoch, holding.release_notice_s, holding.release_keeping)
        return _with(state, releasing), [release]
    held = replace(holding, phase=Phase.HELD)
    return _with(state, held), [Hold(event.epoch, held.deadline), TellHeld(event.epoch)]


def _acked(state: LeaseState, event: HeartbeatAcked) -> Step:
    sent_at = state.sent.get(event.sequence)
    if sent_at is None:
        return state, []
    later = {sequence: at for sequence, at in state.sent.items() if sequence > event.sequence}
    state = replace(state, sent=later, anchor=max(state.anchor, sent_at))
    effects: list[Effect] = []
    for epoch in event.renewed:
        state, more = _renewed(state, epoch, sent_at, event.at)
        effects += more
    state, more = _stale(state, event.stale)
    return state, effects + more


def _renewed(state: LeaseState, epoch: int, sent_at: float, now: float) -> Step:
    holding = state.holdings.get(epoch)
    if holding is None:
        return state, []
    deadline = max(holding.deadline, sent_at + _usable(state, holding.lease))
    in_use = holding.phase in (Phase.HELD, Phase.QUIESCED)
    phase = (Phase.HELD if deadline > now else Phase.QUIESCED) if in_use else holding.phase
    effects: list[Effect] = [] if holding.phase is Phase.ACQUIRING else [Hold(epoch, deadline)]
    return _with(state, replace(holding, phase=phase, deadline=deadline)), effects


def _stale(state: LeaseState, epochs: Iterable[int]) -> Step:
    effects: list[Effect] = []
    for epoch in epochs:
        if epoch in state.holdings:
            effects.append(Drop(epoch))
            state, more = _revoked(state, Revoked(epoch, 0.0))
            effects += more
    return state, effects


def _revoked(state: LeaseState, event: Revoked) -> Step:
    epoch = event.epoch
    holding = state.holdings.get(epoch)
    if holding is None:
        return state, [TellReleased(epoch, state.released.get(epoch, Memory()))]
    if holding.phase is Phase.RELEASING:
        return state, []
    if holding.phase is Phase.ACQUIRING:
        return _with(state, replace(holding, release_notice_s=event.notice_s, release_keeping=event.keep)), []
    releasing = replace(holding, phase=Phase.RELEASING)
    return _with(state, releasing), [Release(epoch, event.notice_s, event.keep)]


def _released(state: LeaseState, event: Released) -> Step:
    if event.epoch not in state.holdings:
        return state, []
    remembered = dict(list(state.released.items())[-_REMEMBERED + 1 :])
    state = replace(_without(state, event.epoch), released={**remembered, event.epoch: event.memory})
    return state, [Drop(event.epoch), TellReleased(event.epoch, event.memory)]


def _tick(state: LeaseState, now: float) -> Step:
    due = [h for h in state.holdings.values() if h.phase is Phase.HELD and h.deadline <= now]
    for holding in due:
        state = _with(state, replace(holding, phase=Phase.QUIESCED))
    return state, [Quiesce(holding.lease.epoch) for holding in due]


def _usable(state: LeaseState, lease: common_pb2.Lease) -> float:
    ttl_s = lease.ttl.ToNanoseconds() / 1e9 or state.default_ttl_s
    return ttl_s - margin(ttl_s)


def _with(state: LeaseState, holding: Holding) -> LeaseState:
    return replace(state, holdings={**state.holdings, holding.lease.epoch: holding})


def _without(state: LeaseState, epoch: int) -> LeaseState:
    return replace(state, holdings={key: value for key, value in state.holdings.items() if key != epoch})
