"""The whole state as a fold over the log, and its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import quotas
from headrace_coordinator.domain.access import Token
from headrace_coordinator.domain.devices.leases import LeaseTable
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.run_states import PAUSED, QUEUED, TERMINAL
from headrace_coordinator.domain.runs import RunState, SuiteEvaluation

SCHEDULING_EVENTS = (
    ev.InstanceRegistered,
    ev.InstanceDraining,
    ev.InstanceLost,
    ev.LeaseEnded,
    ev.DeviceFreed,
    ev.RunSubmitted,
    ev.RunFollowed,
    ev.RunIntentChanged,
    ev.RunStateChanged,
    ev.RunAdmitted,
    ev.RanksWanted,
    ev.RunReleased,
    ev.VersionRestored,
    ev.QuotaSet,
)
"""Events that may change who is admitted."""


class InstanceState(msgspec.Struct):
    """A registered process."""

    instance: str
    incarnation: str
    kind: str
    host: str
    address: str
    devices: list[str]
    capabilities: dict[str, list[str]]
    draining: bool = False
    boot_id: str = ""


class KeyRecord(msgspec.Struct):
    """What an idempotency key was used for, and when."""

    body: str
    resource: str
    at: float = 0.0


class EndedRun(msgspec.Struct, array_like=True):
    """What stays in memory of a run whose history and summary are files."""

    state: str
    created_at: float
    evaluation: bool = False
    owner: str = "admin"
    team: str = ""
    visibility: str = "private"


KEY_LIFETIME_S = 24 * 3600.0
KEYS_KEPT = 10_000
ENDED_KEPT = 10_000


class State(msgspec.Struct):
    """Everything that the coordinator must keep: bounded by active runs and their open steps."""

    store_id: str = ""
    epoch: int = 0
    instances: dict[str, InstanceState] = {}
    table: LeaseTable = msgspec.field(default_factory=LeaseTable)
    runs: dict[str, RunState] = {}
    keys: dict[str, KeyRecord] = {}
    ended: dict[str, EndedRun] = {}
    tokens: dict[str, Token] = {}
    """By the SHA-256 of their secrets."""
    quotas: dict[str, dict[str, float]] = {}
    usage: dict[str, dict[int, float]] = {}
    """Device-seconds by subject of quotas and day."""
    shares: dict[str, float] = {}
    """Device-seconds over weight of teams and users, as fair share counts them."""
    scheduling_changes: int = 0
    """Rises with every event that may change who is admitted."""

    def key(self, key: str, now: float) -> KeyRecord | None:
        """What an idempotency key was used for in the last KEY_LIFETIME_S."""
        record = self.keys.get(key)
        return record if record is not None and now - record.at < KEY_LIFETIME_S else None

    def active_runs(self) -> Iterator[RunState]:
        """Runs that have not ended."""
        return (run for run in self.runs.values() if run.state not in TERMINAL)

    def apply(self, event: ev.Event) -> None:
        """Folds one event."""
        self.table.apply(event)
        if isinstance(event, SCHEDULING_EVENTS):
            self.scheduling_changes += 1
        match event:
            case ev.CoordinatorStarted():
                self.epoch, self.store_id = event.epoch, event.store_id
                for run in self.runs.values():
                    run.apply(event)
            case ev.EpochRaised(epoch=epoch):
                self.epoch = epoch
            case ev.InstanceRegistered():
                known = self.instances.get(event.incarnation)
                self.instances[event.incarnation] = InstanceState(
                    event.instance,
                    event.incarnation,
                    event.kind,
                    event.host,
                    event.address,
                    list(event.devices),
                    event.capabilities,
                    known is not None and known.draining,
                    event.boot_id,
                )
            case ev.InstanceDraining(incarnation=incarnation):
                if instance := self.instances.get(incarnation):
                    instance.draining = True
            case ev.InstanceLost(incarnation=incarnation):
                self.instances.pop(incarnation, None)
            case ev.KeyUsed():
                self._use_key(event)
            case ev.RunArchived():
                self.runs.pop(event.run, None)
                self.ended[event.run] = EndedRun(
                    event.state,
                    event.created_at,
                    event.evaluation,
                    event.owner,
                    event.team,
                    event.visibility,
                )
                _shorten(self.ended, ENDED_KEPT)
            case ev.RunDeleted():
                self.ended.pop(event.run, None)
            case ev.RunShared(run=name, visibility=visibility):
                if shared := self.runs.get(name) or self.ended.get(name):
                    shared.visibility = visibility
            case ev.TokenCreated():
                self.tokens[event.digest] = Token(
                    event.name, event.owner, event.team, event.scopes, event.at, event.expires_at
                )
            case ev.TokenRevoked(name=name):
                self.tokens = {key: each for key, each in self.tokens.items() if each.name != name}
            case ev.RunSubmitted():
                self._submit(event)
            case ev.QuotaSet(subject=subject, limits=limits):
                self.quotas.pop(subject, None)
                if limits:
                    self.quotas[subject] = dict(limits)
            case ev.RunEvent(run=name):
                if named := self.runs.get(name):
                    if isinstance(event, ev.RunAdmitted | ev.RunReleased):
                        self._charge(named, event.at)
                    named.apply(event)
                    if isinstance(event, ev.RunStateChanged) and event.state == QUEUED:
                        self._level(named, event.at)

    def _level(self, newcomer: RunState, now: float) -> None:
        """Raises the share of a run that comes to the queue to the least of the others: time away gives it no claim."""
        others = [run.share(now) for run in self.active_runs() if run is not newcomer and run.state != PAUSED]
        newcomer.share_s = max(newcomer.share_s, min(others, default=0.0))
        self.shares |= dict(quotas.levelled(self, newcomer, now))

    def _charge(self, run: RunState, now: float) -> None:
        """Counts what a run has held until now for its owner and team."""
        if run.grant is None:
            return
        for circle in quotas.circles(run.owner, run.team):
            self.shares[circle] = self.shares.get(circle, 0.0) + run.held_s(now) / run.weight
        _shorten(self.shares, KEYS_KEPT)
        for subject in quotas.subjects(run.owner, run.team):
            quotas.charge(self.usage, subject, run.share_at, now, max(len(run.grant.devices), 1))

    def _use_key(self, event: ev.KeyUsed) -> None:
        self.keys.pop(event.key, None)
        self.keys[event.key] = KeyRecord(event.body, event.resource, event.at)
        while event.at - self.keys[next(iter(self.keys))].at >= KEY_LIFETIME_S:
            del self.keys[next(iter(self.keys))]
        _shorten(self.keys, KEYS_KEPT)

    def _submit(self, event: ev.RunSubmitted) -> None:
        algorithm = event.spec["algorithm"]
        self.runs[event.run] = RunState(
            id=event.run,
            spec=event.spec,
            directory=event.directory,
            ledger=SlotLedger(algorithm["group_size"], algorithm["prompts_per_step"]),
            lineage=Lineage(),
            created_at=event.at,
            queued_at=event.at,
            steps_total=event.spec["steps"],
            evaluation=msgspec.convert(event.evaluation, SuiteEvaluation) if event.evaluation else None,
            follows=event.follows,
            owner=event.owner,
            team=event.team,
            visibility=event.visibility,
        )
        self._level(self.runs[event.run], event.at)


def _shorten(entries: dict[str, Any], kept: int) -> None:
    """Removes the oldest entries beyond `kept`."""
    while len(entries) > kept:
        del entries[next(iter(entries))]


_decoder = msgspec.json.Decoder(State)


def snapshot(state: State) -> bytes:
    """The state as JSON."""
    return msgspec.json.encode(state)


def restore(data: bytes) -> State:
    """A state from its snapshot; raises msgspec.ValidationError on anything else."""
    return _decoder.decode(data)
