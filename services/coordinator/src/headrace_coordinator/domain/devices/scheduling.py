"""Which runs may use which instances and devices: admission as one pure function of the state and the time.

Order among runs: those that have waited too long, then priority, then fair share (device-seconds used over
weight), then submission. Knows no session and no clock: a `RunAdmitted` event equals the function replayed on
the log before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from headrace_schema.sections.running import EVERY

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.demand import Demand, demand_of, shares
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.places import (
    device_order,
    devices_seen,
    hosts_of,
    machines,
    named_devices,
)
from headrace_coordinator.domain.devices.room import least_room
from headrace_coordinator.domain.runs import QUEUED, RECOVERING, RUN, Grant, RunState
from headrace_coordinator.domain.state import InstanceState, State

PATIENCE_QUANTA = 10
"""A run that has waited so many of its quanta comes first, whatever its priority."""


class Gift(msgspec.Struct, frozen=True):
    """The smaller trainer group that a run should go on with, so that another one can start."""

    ranks: int
    given_to: str
    reason: str


class Plan(msgspec.Struct):
    """Grants to append one at a time, what runs should leave at their next step boundary, and why others wait."""

    grants: list[ev.RunAdmitted]
    yields: dict[str, str]
    """Run id → why it should yield."""
    gifts: dict[str, Gift]
    """Run id → the trainers that it should give back; of runs that should not yield."""
    waiting: dict[str, str]
    """Id of each waiting run → what it waits for, in the order of the queue."""


def plan_admission(state: State, now: float) -> Plan:
    """Grants, yields and reasons; see the module."""
    return _Planner(state, now).plan()


def plan_regroup(
    state: State, run_id: str, ranks: int, reason: str, now: float, given_to: str = ""
) -> ev.TrainersChanged | str:
    """The event with which an admitted run's trainer group gets another size, or what is missing.

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
        rollouts=list(grant.rollouts),
        trainers=list(grant.trainers),
        devices=list(grant.devices),
        helpers=list(grant.helpers),
        repliers=list(grant.repliers),
        ranks=ranks,
        step=run.ledger.step,
        reason=reason,
        given_to=given_to,
    )


def order_key(run: RunState, now: float) -> tuple[bool, int, float, float, str]:
    """Sorts runs: who comes first in the queue, and who may displace whom."""
    patient = run.state != QUEUED or _within(now - run.queued_at, PATIENCE_QUANTA * run.quantum_s)
    return patient, -run.priority, run.share(now), run.created_at, run.id


def _within(elapsed: float, limit: float) -> bool:
    """Whether a time has not passed. The wall clock may be set back: a time that cannot be told counts as passed."""
    return 0.0 <= elapsed < limit


class _Planner:
    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._machines = machines(state.instances.values())
        runs = sorted(state.active_runs(), key=lambda run: order_key(run, now))
        self._admitted = [run for run in runs if run.grant is not None]
        self._waiting = [run for run in runs if run.state == QUEUED and run.intent == RUN]
        self._grants = {run.id: run.grant for run in self._admitted if run.grant is not None}

    def plan(self) -> Plan:
        plan = Plan([], {}, {}, {})
        for run in self._admitted:
            self._refill(run, plan, grow=False)
        for run in self._waiting:
            grant = self._fit(run, self._grants)
            if isinstance(grant, Grant):
                self._admit(run, grant, plan)
            else:
                plan.waiting[run.id] = grant
                if not order_key(run, self._now)[0]:
                    break  # The longest-waiting run is next: nobody overtakes it any more.
        for run_id, reason in list(plan.waiting.items()):
            self._make_room(self._state.runs[run_id], reason, plan)
        plan.gifts = {name: gift for name, gift in plan.gifts.items() if name not in plan.yields}
        for run in self._waiting:
            if run.id not in plan.waiting and run.id not in self._grants:
                plan.waiting[run.id] = "an earlier run, which has waited longer, to start first"
        if not plan.waiting:
            for run in self._admitted:
                self._refill(run, plan, grow=True)
        return plan

    def regroup(self, run: RunState, held: Grant, ranks: int, *, fair: bool) -> Grant | str:
        """What an admitted run would hold with another number of trainers, or what is missing."""
        own = self._usable(held.trainers)[:ranks]
        kept = self._kept(held, own)
        others = {name: grant for name, grant in self._grants.items() if name != run.id}
        return self._fit(
            run, others, kept, msgspec.structs.replace(demand_of(run), trainers=ranks, fair=fair)
        )

    def _admit(self, run: RunState, grant: Grant, plan: Plan) -> None:
        self._grants[run.id] = grant
        plan.grants.append(
            ev.RunAdmitted(
                at=self._now,
                run=run.id,
                rollouts=list(grant.rollouts),
                trainers=list(grant.trainers),
                devices=list(grant.devices),
                helpers=list(grant.helpers),
                repliers=list(grant.repliers),
            )
        )

    def _refill(self, run: RunState, plan: Plan, *, grow: bool) -> None:
        """Replaces what an admitted run has lost; with `grow`, adds rollouts up to what it asked for."""
        held = self._grants[run.id]
        # A trainer that was told to stop stays until its state is saved: the run is RECOVERING then.
        trainers = self._usable(held.trainers, draining=run.state != RECOVERING)
        kept = self._kept(held, trainers)
        demand = demand_of(run)
        lacks = len(kept.rollouts) < demand.fewest_rollouts or len(kept.trainers) < demand.trainers
        lacks |= len(kept.repliers) < demand.fewest_repliers
        fewer = len(kept.rollouts) < demand.rollouts or len(kept.helpers) < demand.helpers + demand.decoders
        fewer |= len(kept.repliers) < demand.repliers
        if kept == held and not lacks and not (grow and fewer):
            return
        others = {name: grant for name, grant in self._grants.items() if name != run.id}
        grant = self._fit(run, others, kept)
        if isinstance(grant, str):
            grant = kept  # What is lost is no longer held; the run itself waits, or queues.
        if grant != held:
            self._admit(run, grant, plan)

    def _kept(self, held: Grant, trainers: list[str]) -> Grant:
        """What a run still has of its grant, beside `trainers`."""
        rollouts, repliers = self._usable(held.rollouts), self._usable(held.repliers)
        return Grant(rollouts, trainers, held.devices, self._helpers(held.helpers), repliers)

    def _helpers(self, incarnations: Iterable[str]) -> list[str]:
        """Helpers that stay: while a run waits, an idle one goes to whoever has more need of it."""
        table, waits = self._state.table, bool(self._waiting)
        return [who for who in self._usable(incarnations) if not waits or table.of(who)]

    def _usable(self, incarnations: Iterable[str], *, draining: bool = False) -> list[str]:
        known = self._state.instances
        return [who for who in incarnations if who in known and (draining or not known[who].draining)]

    # --- does it fit?

    def _fit(
        self,
        run: RunState,
        grants: dict[str, Grant],
        kept: Grant | None = None,
        demand: Demand | None = None,
    ) -> Grant | str:
        """A grant beside `grants`, or what is missing."""
        demand, kept = demand or demand_of(run), kept or Grant()
        taken = {who for grant in grants.values() for who in grant.instances}
        if not any(i.kind == "reward" and not i.draining for i in self._state.instances.values()):
            return "a reward instance to register"
        if demand.simulator and not simulators(self._state.instances.values(), demand.simulator):
            return f"a simulator instance with the backend {demand.simulator} to register"
        reply = self._repliers(demand, taken | {*kept.rollouts}, kept.repliers, demand.fewest_repliers)
        if len(reply) < demand.fewest_repliers:
            missing = self._missing("rollout", demand.fewest_repliers, len(reply), grants)
            return f"{missing} to reply on {', '.join(demand.reply_devices)}"
        taken |= {*reply}
        rollouts = self._choose("rollout", {"engines": demand.engine}, taken, kept.rollouts, demand.rollouts)
        if len(rollouts) < demand.fewest_rollouts:
            return self._missing("rollout", demand.fewest_rollouts, len(rollouts), grants)
        decode = [i.incarnation for i in rollouts]
        reply = self._repliers(demand, taken - {*reply} | {*decode}, reply, demand.repliers)
        facets = {"backends": demand.backend, demand.algorithms: demand.algorithm}
        trainers = self._choose("trainer", facets, taken, kept.trainers, demand.trainers)
        if len(trainers) < demand.trainers:
            return self._missing("trainer", demand.trainers, len(trainers), grants)
        seeing = self._simulators_on(demand)
        if demand.simulator_devices and not seeing:
            return f"a simulator instance that has {', '.join(demand.simulator_devices)} to register"
        replying = [self._state.instances[who] for who in reply]
        members = (*rollouts, *replying, *trainers, *seeing)
        devices = self._devices(demand, members, grants, kept.devices)
        if isinstance(devices, str):
            return devices
        owners = [i.incarnation for i in trainers]
        taken |= {*owners, *decode, *reply}
        helpers = self._beyond("trainer", facets, taken, kept, demand.helpers)
        helpers += self._beyond("rollout", {"engines": demand.engine}, taken, kept, demand.decoders)
        return Grant(decode, owners, devices, helpers, reply)

    def _repliers(self, demand: Demand, taken: set[str], own: Sequence[str], most: int) -> list[str]:
        """Rollout instances that see a device for replies: the run's own, and up to `most` the last by name."""
        if not demand.repliers:
            return []
        free = self._choose("rollout", {"engines": demand.engine}, taken, own, len(self._state.instances))
        hosts = hosts_of(free)
        seeing = [i for i in free if named_devices(demand.reply_devices, i.devices, hosts)]
        mine = [i.incarnation for i in seeing if i.incarnation in own]
        others = [i.incarnation for i in reversed(seeing) if i.incarnation not in own]
        return [*mine, *others][: max(most, min(len(mine), demand.repliers))]

    def _beyond(
        self, kind: str, facets: dict[str, str], taken: set[str], kept: Grant, most: int
    ) -> list[str]:
        """Helpers: while a run waits, no more than there are, for nobody waits for what a run has beyond its need."""
        if self._waiting:
            most = sum(self._state.instances[who].kind == kind for who in kept.helpers)
        return [i.incarnation for i in self._choose(kind, facets, taken, kept.helpers, most)]

    def _choose(
        self, kind: str, facets: dict[str, str], taken: set[str], own: Sequence[str], count: int
    ) -> list[InstanceState]:
        """Up to `count` free instances: those that the run has, in their order, then others by name."""
        places = {who: place for place, who in enumerate(own)}
        fitting = [
            i
            for i in self._state.instances.values()
            if i.kind == kind
            and (not i.draining or i.incarnation in own)
            and i.incarnation not in taken
            and _has(i, facets)
        ]
        fitting.sort(key=lambda i: (places.get(i.incarnation, len(own)), i.instance, i.incarnation))
        return fitting[:count]

    def _missing(self, kind: str, wanted: int, free: int, grants: dict[str, Grant]) -> str:
        users = sorted(
            run
            for run, grant in grants.items()
            if ((grant.rollouts or grant.repliers) if kind == "rollout" else grant.trainers)
        )
        return f"{wanted} {kind} instance{'s' if wanted > 1 else ''} ({free} free{_held_by(users)})"

    def _devices(
        self,
        demand: Demand,
        members: Sequence[InstanceState],
        grants: dict[str, Grant],
        own: Sequence[str],
    ) -> list[str] | str:
        chosen: list[str] = []
        users = Counter(device for grant in grants.values() for device in grant.devices)
        busy: dict[str, list[str]] = {}
        for name, grant in grants.items():
            if not (demand.shares and shares(self._state.runs[name])):
                for device in grant.devices:
                    busy.setdefault(device, []).append(name)
        for machine in sorted({self._machines[i.incarnation] for i in members}):
            here = [i for i in members if self._machines[i.incarnation] == machine]
            generate, learn = (sum(i.kind == kind for i in here) for kind in ("rollout", "trainer"))
            needed = generate + learn if demand.disaggregated else max(generate, learn)
            if not devices_seen(here):
                continue  # Instances without devices of their own run without a lease.
            everything = self._devices_of(here)
            free = [device for device in everything if device not in busy]
            sides = (*demand.rollout_devices, *demand.trainer_devices, *demand.reply_devices)
            names = sides if generate or learn else ()
            if len(here) > generate + learn:
                names += demand.simulator_devices
            named = named_devices(names, everything, hosts_of(here))
            named += self._doubtful(names, here)
            if named:
                if missing := [device for device in named if device not in free]:
                    who = _held_by(name for d in missing for name in busy.get(d, ()))
                    return f"{', '.join(missing)} to be free{who or '; in quarantine'}"
                chosen += named
                continue
            if not generate and not learn:
                continue  # Simulators are here alone, and none of these devices is named for them.
            # What an admitted run has beyond its need stays: its leases may cover it until a step has ended.
            mine = sum(device in own for device in free)
            part = len(everything) // (1 if demand.shares else self._parts(demand))
            if own:
                part = min(mine, part) if demand.fair else mine
            fair = max(needed, part)
            if all(is_gpu(device) for device in everything):
                # An engine and a rank compute on one GPU each: more would idle.
                fair = generate + learn if demand.side_by_side else needed
            # Also a run that shares takes first what no other run was granted.
            free.sort(key=lambda device: (device not in own, users[device], everything.index(device)))
            if len(free) < needed:
                holders = _held_by(name for device in everything for name in busy.get(device, ()))
                plural = "s" if needed > 1 else ""
                return (
                    f"{needed} device{plural} on {machine} ({len(free)} free of {len(everything)}{holders})"
                )
            chosen += sorted(free[:fair], key=everything.index)
        return chosen

    def _doubtful(self, names: Sequence[str], here: Sequence[InstanceState]) -> list[str]:
        """Devices in quarantine that are named one by one: a run waits for them, and does without others."""
        single = [name for name in names if name.rpartition("/")[2] != EVERY]
        lost = sorted(devices_seen(here) & self._state.table.quarantined.keys(), key=device_order)
        return named_devices(single, lost, hosts_of(here))

    def _simulators_on(self, demand: Demand) -> list[InstanceState]:
        """Simulators that see one of the devices that are named for simulators."""
        found = simulators(self._state.instances.values(), demand.simulator)
        hosts = hosts_of(found)
        return [i for i in found if named_devices(demand.simulator_devices, i.devices, hosts)]

    def _devices_of(self, instances: Iterable[InstanceState]) -> list[str]:
        """Devices that the instances can use and that are not in quarantine, by name."""
        return sorted(devices_seen(instances) - self._state.table.quarantined.keys(), key=device_order)

    def _parts(self, demand: Demand) -> int:
        """Parts that a host's devices are divided into: how many runs of this demand the instances can carry."""
        rollouts = self._count("rollout") // max(demand.fewest_rollouts + demand.fewest_repliers, 1)
        if not demand.trainers:
            return max(1, rollouts)
        return max(1, min(rollouts, self._count("trainer") // demand.trainers))

    def _count(self, kind: str) -> int:
        return sum(i.kind == kind and not i.draining for i in self._state.instances.values())

    # --- room for those that wait

    def _make_room(self, run: RunState, reason: str, plan: Plan) -> None:
        """The least that admitted runs leave so that `run` starts: surplus trainers, or all that they hold."""
        offers = {other.id: self._offers(other, run) for other in reversed(self._admitted)}
        left = least_room(self._grants, offers, lambda grants: isinstance(self._fit(run, grants), Grant))
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
        """What an admitted run may hold so that `run` starts, from the most to the least; None: nothing.

        Trainers beyond those of its spec are for whoever waits; what that names, for a run that comes before it.
        """
        if other.grant is None or _within(self._now - other.admitted_at, other.quantum_s):
            return []
        before = order_key(run, self._now) < order_key(other, self._now)
        offers: list[Grant | None] = []
        if not _within(self._now - other.regrouped_at, other.quantum_s):
            least = other.sizes[0] if before else other.own_ranks
            sizes = [ranks for ranks in other.sizes if least <= ranks < other.ranks]
            smaller = (self.regroup(other, other.grant, ranks, fair=True) for ranks in reversed(sizes))
            offers += [grant for grant in smaller if isinstance(grant, Grant)]
        return [*offers, None] if before else offers


def simulators(instances: Iterable[InstanceState], backend: str) -> list[InstanceState]:
    """Simulators that offer a backend and were not told to stop; they serve many runs at once."""
    return [
        i for i in instances if i.kind == "simulator" and not i.draining and _has(i, {"backends": backend})
    ]


def _held_by(runs: Iterable[str]) -> str:
    names = sorted(set(runs))
    return f"; held by {', '.join(names)}" if names else ""


def _has(instance: InstanceState, facets: dict[str, str]) -> bool:
    """Whether an instance offers what is named; one that declares nothing of a facet is taken to have it."""
    return all(
        not instance.capabilities.get(facet) or name in instance.capabilities[facet]
        for facet, name in facets.items()
    )
