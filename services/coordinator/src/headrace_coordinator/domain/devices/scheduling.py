"""Which runs may use which instances and devices: admission as one pure function of the state and the time.

Order among runs: those that have waited too long, then priority, then fair share (device-seconds used over weight) of
teams, of users, of runs, then submission. Knows no session and no clock: a `RunAdmitted` event equals the function
replayed on the log before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import quotas
from headrace_coordinator.domain.devices.demand import demand_of
from headrace_coordinator.domain.devices.fitting import Fitting
from headrace_coordinator.domain.run_states import QUEUED, RECOVERING, RUN
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.state import State

PATIENCE_QUANTA = 10
"""Quanta after which a waiting run comes first, whatever its priority."""

Order = tuple[bool, int, float, float, float, float, str]
Offers = Mapping[str, Sequence[Grant | None]]
"""Id of a run → what it may hold in place of its grant, from the most to the least; None, the last: nothing."""


class Gift(msgspec.Struct, frozen=True):
    """The smaller trainer group that a run should go on with, so that another one can start."""

    ranks: int
    given_to: str
    reason: str


class Plan(msgspec.Struct):
    """Grants to append one at a time, which runs should yield or shrink at their next step, and why others wait."""

    grants: list[ev.RunAdmitted]
    yields: dict[str, str]
    """Run id → why it should yield."""
    gifts: dict[str, Gift]
    """Run id → the smaller trainer group that it should go on with; of runs that should not yield."""
    waiting: dict[str, str]
    """Id of each waiting run → what it waits for, in the order of the queue."""


def plan_admission(state: State, now: float) -> Plan:
    """Grants, yields and reasons; see the module."""
    return _Planner(state, now).plan()


def plan_regroup(
    state: State, run_id: str, ranks: int, reason: str, now: float, given_to: str = ""
) -> ev.TrainersChanged | str:
    """The event that changes the size of an admitted run's trainer group, or what is missing.

    Its ranks stay in order: the leader stays the leader. A run that gives trainers to another one keeps its fair
    part of the devices; any other one keeps all that it has.
    """
    run = state.runs[run_id]
    if run.grant is None:
        return "the run to be admitted"
    grant = _Planner(state, now).regroup(run, run.grant, ranks, fair=bool(given_to))
    if isinstance(grant, str):
        return grant
    return ev.TrainersChanged(
        at=now,
        run=run.id,
        **msgspec.structs.asdict(grant),
        ranks=ranks,
        step=run.ledger.step,
        reason=reason,
        given_to=given_to,
    )


def order_key(run: RunState, now: float, shares: Mapping[str, float]) -> Order:
    """Sorts runs: a run may displace those that come after it. `shares`: of teams and users, see `quotas`."""
    patient = run.state != QUEUED or _within(now - run.queued_at, PATIENCE_QUANTA * run.quantum_s)
    team, user = (shares.get(circle, 0.0) for circle in quotas.circles(run.owner, run.team))
    return patient, -run.priority, team, user, run.share(now), run.created_at, run.id


def _within(elapsed: float, limit: float) -> bool:
    """Whether a time is not over. Where the wall clock was set back, it counts as over."""
    return 0.0 <= elapsed < limit


class _Planner:
    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._shares = quotas.live_shares(state, now)
        runs = sorted(state.active_runs(), key=self._order)
        self._admitted = [run for run in runs if run.grant is not None]
        wanting = [run for run in runs if run.state == QUEUED and run.intent == RUN]
        self._following = [run for run in wanting if run.awaited]
        wanting = [run for run in wanting if not run.awaited]
        spent = {run.id: quotas.exhausted(state, run, now) for run in (*wanting, *self._admitted)}
        self._exhausted = {run: reason for run, reason in spent.items() if reason}
        """Ids of runs whose device-hours are used up, and until when."""
        self._waiting = [run for run in wanting if run.id not in self._exhausted]
        self._grants = {run.id: run.grant for run in self._admitted if run.grant is not None}
        self._fitting = Fitting(state, waits=bool(self._waiting))

    def _order(self, run: RunState) -> Order:
        return order_key(run, self._now, self._shares)

    def plan(self) -> Plan:
        plan = Plan([], {}, {}, {})
        spent: set[str] = set()  # runs that wait for a quota: nobody makes room for them
        for run in self._admitted:
            self._refill(run, plan, grow=False)
        for run in self._waiting:
            grant = self._fitting.grant(run, self._grants)
            if isinstance(grant, Grant) and (
                over := quotas.beyond(self._state, self._grants, run, len(grant.devices))
            ):
                plan.waiting[run.id] = over
                spent.add(run.id)
            elif isinstance(grant, Grant):
                self._admit(run, grant, plan)
            else:
                plan.waiting[run.id] = grant
                if not self._order(run)[0]:
                    break  # This run has waited longest: no run behind it is admitted before it.
        for name, reason in self._exhausted.items():
            (plan.yields if name in self._grants else plan.waiting)[name] = reason
        spent |= self._exhausted.keys()
        for run_id, reason in [item for item in plan.waiting.items() if item[0] not in spent]:
            self._make_room(self._state.runs[run_id], reason, plan)
        plan.gifts = {name: gift for name, gift in plan.gifts.items() if name not in plan.yields}
        for run in self._waiting:
            if run.id not in plan.waiting and run.id not in self._grants:
                plan.waiting[run.id] = "an earlier run, which has waited longer, to start first"
        if plan.waiting.keys() <= spent:
            for run in self._admitted:
                self._refill(run, plan, grow=True)
        plan.waiting |= {run.id: f"run {run.awaited} to succeed" for run in self._following}
        return plan

    def regroup(self, run: RunState, held: Grant, ranks: int, *, fair: bool) -> Grant | str:
        """What an admitted run would hold with another number of trainers, or what is missing."""
        own = self._usable(held.trainers)[:ranks]
        kept = self._kept(held, own)
        others = {name: grant for name, grant in self._grants.items() if name != run.id}
        demand = msgspec.structs.replace(demand_of(run), trainers=ranks, fair=fair)
        grant = self._fitting.grant(run, others, kept, demand)
        if isinstance(grant, Grant) and len(grant.devices) > len(held.devices):
            return quotas.beyond(self._state, others, run, len(grant.devices)) or grant
        return grant

    def _admit(self, run: RunState, grant: Grant, plan: Plan) -> None:
        self._grants[run.id] = grant
        plan.grants.append(ev.RunAdmitted(at=self._now, run=run.id, **msgspec.structs.asdict(grant)))

    def _refill(self, run: RunState, plan: Plan, *, grow: bool) -> None:
        """Replaces what an admitted run has lost; with `grow`, adds rollouts up to what it asked for."""
        held = self._grants[run.id]
        # A trainer that was told to stop is kept until its state is saved: the run is RECOVERING then.
        trainers = self._usable(held.trainers, draining=run.state != RECOVERING)
        kept = self._kept(held, trainers)
        demand = demand_of(run)
        lacks = len(kept.rollouts) < demand.fewest_rollouts or len(kept.trainers) < demand.trainers
        fewer = len(kept.rollouts) < demand.rollouts or len(kept.helpers) < demand.helpers + demand.decoders
        if kept == held and not lacks and not (grow and fewer):
            return
        others = {name: grant for name, grant in self._grants.items() if name != run.id}
        grant = self._fitting.grant(run, others, kept)
        if isinstance(grant, Grant) and len(grant.devices) > len(held.devices):
            grant = quotas.beyond(self._state, others, run, len(grant.devices)) or grant
        if isinstance(grant, str):
            grant = kept  # It no longer holds what was lost; the run loop waits for a replacement, or queues.
        if grant != held:
            self._admit(run, grant, plan)

    def _kept(self, held: Grant, trainers: list[str]) -> Grant:
        """The part of a run's grant that is left, with `trainers` for its trainers."""
        return Grant(self._usable(held.rollouts), trainers, held.devices, self._helpers(held.helpers))

    def _helpers(self, incarnations: Iterable[str]) -> list[str]:
        """Helpers that the run keeps: while another run waits, those without a lease are not kept."""
        table, waits = self._state.table, bool(self._waiting)
        return [who for who in self._usable(incarnations) if not waits or table.of(who)]

    def _usable(self, incarnations: Iterable[str], *, draining: bool = False) -> list[str]:
        known = self._state.instances
        return [who for who in incarnations if who in known and (draining or not known[who].draining)]

    # --- room for those that wait

    def _make_room(self, run: RunState, reason: str, plan: Plan) -> None:
        """Plans the least that admitted runs release so that `run` starts: surplus trainers, or all that they hold."""
        offers = {other.id: self._offers(other, run) for other in reversed(self._admitted)}
        left = least_room(
            self._grants, offers, lambda grants: isinstance(self._fitting.grant(run, grants), Grant)
        )
        for name, kept in left.items():
            if kept is None:
                plan.yields[name] = f"yields to {run.id}, which waits for {reason}"
                continue
            ranks, before = len(kept.trainers), plan.gifts.get(name)
            more = self._state.runs[name].ranks - ranks
            said = f"gives {more} trainer{'s' if more > 1 else ''} to {run.id}, which waits for {reason}"
            if before is None or ranks < before.ranks:
                plan.gifts[name] = Gift(ranks, run.id, said)
            plan.waiting[run.id] += f"; {name} {said.partition(' to ')[0]} when its step ends"

    def _offers(self, other: RunState, run: RunState) -> list[Grant | None]:
        """What an admitted run may be left with so that `run` starts, from the most to the least; None: nothing.

        Any waiting run may get the trainers beyond those of its spec; only a run that comes before it, the others.
        """
        if other.grant is None or _within(self._now - other.admitted_at, other.quantum_s):
            return []
        before = self._order(run) < self._order(other)
        offers: list[Grant | None] = []
        if not _within(self._now - other.regrouped_at, other.quantum_s):
            least = other.sizes[0] if before else other.own_ranks
            sizes = [ranks for ranks in other.sizes if least <= ranks < other.ranks]
            smaller = (self.regroup(other, other.grant, ranks, fair=True) for ranks in reversed(sizes))
            offers += [grant for grant in smaller if isinstance(grant, Grant)]
        return [*offers, None] if before else offers


def least_room(
    grants: Mapping[str, Grant], offers: Offers, fits: Callable[[dict[str, Grant]], bool]
) -> dict[str, Grant | None]:
    """Id of each run that releases something → what it keeps; empty where no offers let the waiting run start.

    Smaller groups are taken before whole runs, and each in the order of `offers`.
    """
    left: dict[str, Grant | None] = {}
    for whole in (False, True):
        for name, kept in offers.items():
            least = [grant for grant in kept if whole or grant is not None][-1:]
            if not least or (whole and least[0] is not None):
                continue
            left[name] = least[0]
            if fits(_beside(grants, left)):
                return _most_kept(grants, offers, left, fits)
    return {}


def _most_kept(
    grants: Mapping[str, Grant],
    offers: Offers,
    left: dict[str, Grant | None],
    fits: Callable[[dict[str, Grant]], bool],
) -> dict[str, Grant | None]:
    """Each run keeps the most with which the waiting run still fits, beginning with those that would keep nothing."""
    for name in sorted(left, key=lambda name: left[name] is not None):
        for kept in (grants[name], *offers[name]):
            if fits(_beside(grants, left | {name: kept})):
                left[name] = kept
                break
    return {name: kept for name, kept in left.items() if kept != grants[name]}


def _beside(grants: Mapping[str, Grant], left: Mapping[str, Grant | None]) -> dict[str, Grant]:
    return {name: grant for name, grant in {**grants, **left}.items() if grant is not None}
