"""Which instances and devices one run gets beside what others hold, or what is missing. Knows no queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace_schema.sections.running import EVERY

from headrace_coordinator.domain.devices.demand import Demand, demand_of, shares
from headrace_coordinator.domain.devices.leases import all_gpus
from headrace_coordinator.domain.devices.places import (
    device_order,
    devices_seen,
    engine_groups,
    hosts_of,
    machines,
    named_devices,
)
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.state import InstanceState, State


class Fitting:
    """Fits runs into a fleet. `waits`: a run waits, so that no run gets more helpers than it has."""

    def __init__(self, state: State, *, waits: bool) -> None:
        self._state = state
        self._waits = waits
        self._machines = machines(state.instances.values())

    def grant(
        self,
        run: RunState,
        grants: dict[str, Grant],
        kept: Grant | None = None,
        demand: Demand | None = None,
    ) -> Grant | str:
        """A grant beside `grants`, or what is missing."""
        demand, kept = demand or demand_of(run), kept or Grant()
        taken = {who for grant in grants.values() for who in grant.instances}
        if demand.scores and not any(
            i.kind == "reward" and not i.draining for i in self._state.instances.values()
        ):
            return "a reward instance to register"
        if demand.simulator and not simulators(self._state.instances.values(), demand.simulator):
            return f"a simulator instance with the backend {demand.simulator} to register"
        room = self._room(demand, grants, demand.section.rollout)
        rollouts = self._choose(
            "rollout",
            {"engines": demand.engine},
            taken,
            kept.rollouts,
            demand.rollouts,
            room,
            demand.engine_gpus,
            demand.engine_hosts,
        )
        if len(rollouts) < demand.fewest_rollouts:
            missing = self._missing("rollout", demand.fewest_rollouts, len(rollouts), grants)
            spread = f", {demand.engine_hosts} of them on different hosts for each engine"
            return missing + (spread if demand.engine_hosts > 1 else "")
        decode = [i.incarnation for i in rollouts]
        facets = {"backends": demand.backend, demand.algorithms: demand.algorithm}
        room = self._room(demand, grants, demand.section.trainer)
        for each in rollouts if demand.placement.apart and not demand.placement.joins else ():
            if (machine := self._machines[each.incarnation]) in room:
                room[machine] -= demand.engine_gpus
        trainers = self._choose("trainer", facets, taken, kept.trainers, demand.trainers, room)
        if len(trainers) < demand.trainers:
            return self._missing("trainer", demand.trainers, len(trainers), grants)
        seeing = self._simulators_on(demand)
        if demand.section.simulator and not seeing:
            return f"a simulator instance that has {', '.join(demand.section.simulator)} to register"
        scoring = self._scorers_on(demand)
        if demand.section.reward and not scoring:
            return f"a reward instance that has {', '.join(demand.section.reward)} to register"
        seeing += scoring
        members = (*rollouts, *trainers, *seeing)
        devices = self._devices(demand, members, grants, kept.devices)
        if isinstance(devices, str):
            return devices
        owners = [i.incarnation for i in trainers]
        taken |= {*owners, *decode}
        helpers = self._beyond("trainer", facets, taken, kept, demand.helpers)
        helpers += self._beyond("rollout", {"engines": demand.engine}, taken, kept, demand.decoders)
        return Grant(decode, owners, devices, helpers)

    def _beyond(
        self, kind: str, facets: dict[str, str], taken: set[str], kept: Grant, most: int
    ) -> list[str]:
        """Helpers, at most `most`; while a run waits, no more than the run has."""
        if self._waits:
            most = sum(self._state.instances[who].kind == kind for who in kept.helpers)
        return [i.incarnation for i in self._choose(kind, facets, taken, kept.helpers, most)]

    def _choose(
        self,
        kind: str,
        facets: dict[str, str],
        taken: set[str],
        own: Sequence[str],
        count: int,
        room: Mapping[str, int] | None = None,
        each: int = 1,
        hosts: int = 1,
    ) -> list[InstanceState]:
        """Up to `count` free instances: those that the run has, in their order, then others by name.

        `room`: GPUs that are free by machine, of which each instance is to hold `each`: those without come last.
        `hosts`: number of hosts whose instances make one engine; these follow each other.
        """
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
        left = {**(room or {})}
        seated: list[InstanceState] = []
        others: list[InstanceState] = []
        for instance in fitting:
            machine = self._machines[instance.incarnation]
            fits = machine not in left or (left[machine] >= each and len(instance.devices) >= each)
            if fits and machine in left:
                left[machine] -= each
            (seated if fits or instance.incarnation in places else others).append(instance)
        groups = engine_groups([*seated, *others], hosts)
        return [member for group in groups for member in group][:count]

    def _room(self, demand: Demand, grants: Mapping[str, Grant], names: Sequence[str]) -> dict[str, int]:
        """GPUs that a side can have, by machine: free ones, of `names` if there are any. Machines of GPUs alone."""
        busy = self._busy(demand, grants)
        found: dict[str, int] = {}
        for machine in {*self._machines.values()}:
            here = [i for i in self._state.instances.values() if self._machines[i.incarnation] == machine]
            if all_gpus(everything := self._devices_of(here)):
                wanted = named_devices(names, everything, hosts_of(here)) if names else everything
                found[machine] = sum(device not in busy for device in wanted)
        return found

    def _busy(self, demand: Demand, grants: Mapping[str, Grant]) -> dict[str, list[str]]:
        """Devices that a run cannot have beside others, and the runs that were granted them."""
        busy: dict[str, list[str]] = {}
        for name, grant in grants.items():
            if not (demand.section.share and shares(self._state.runs[name])):
                for device in grant.devices:
                    busy.setdefault(device, []).append(name)
        return busy

    def _missing(self, kind: str, wanted: int, free: int, grants: dict[str, Grant]) -> str:
        users = sorted(
            run for run, grant in grants.items() if (grant.rollouts if kind == "rollout" else grant.trainers)
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
        busy = self._busy(demand, grants)
        for machine in sorted({self._machines[i.incarnation] for i in members}):
            here = [i for i in members if self._machines[i.incarnation] == machine]
            generate, learn = (sum(i.kind == kind for i in here) for kind in ("rollout", "trainer"))
            if not devices_seen(here):
                continue  # Instances without devices of their own run without a lease.
            everything = self._devices_of(here)
            on_gpus = all_gpus(everything)
            engines = generate * (demand.engine_gpus if on_gpus else demand.engines)
            beside = demand.placement.apart and not (demand.placement.joins and on_gpus)
            needed = engines + learn if beside else max(engines, learn)
            free = [device for device in everything if device not in busy]
            names = [*demand.section.rollout, *demand.section.trainer] if generate or learn else []
            kinds = {each.kind for each in here}
            names += demand.section.simulator if "simulator" in kinds else []
            names += demand.section.reward if "reward" in kinds else []
            named = named_devices(names, everything, hosts_of(here))
            named += self._doubtful(names, here)
            if named:
                if missing := [device for device in named if device not in free]:
                    who = _held_by(name for d in missing for name in busy.get(d, ()))
                    return f"{', '.join(missing)} to be free{who or '; in quarantine'}"
                chosen += named
                continue
            if not generate and not learn:
                continue  # Simulators or scorers are here alone, and none of these devices is named for them.
            # What an admitted run has beyond its need it keeps: its leases may cover it until a step has ended.
            mine = sum(device in own for device in free)
            part = len(everything) // (1 if demand.section.share else self._parts(demand))
            if own:
                part = min(mine, part) if demand.fair else mine
            fair = max(needed, part)
            if on_gpus:
                # An engine computes on the GPUs that its parallel sizes need, a rank on one: more would be idle.
                fair = engines + learn if demand.side_by_side and not demand.placement.joins else needed
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
        """Devices in quarantine that are named one by one: a run waits for these, and not for others."""
        single = [name for name in names if name.rpartition("/")[2] != EVERY]
        lost = sorted(devices_seen(here) & self._state.table.quarantined.keys(), key=device_order)
        return named_devices(single, lost, hosts_of(here))

    def _simulators_on(self, demand: Demand) -> list[InstanceState]:
        """Simulators that see one of the devices that are named for simulators."""
        found = simulators(self._state.instances.values(), demand.simulator)
        hosts = hosts_of(found)
        return [i for i in found if named_devices(demand.section.simulator, i.devices, hosts)]

    def _scorers_on(self, demand: Demand) -> list[InstanceState]:
        """Reward instances that see one of the devices that are named for scorers."""
        found = [i for i in self._state.instances.values() if i.kind == "reward" and not i.draining]
        hosts = hosts_of(found)
        return [i for i in found if named_devices(demand.section.reward, i.devices, hosts)]

    def _devices_of(self, instances: Iterable[InstanceState]) -> list[str]:
        """Devices that the instances can use and that are not in quarantine, by name."""
        return sorted(devices_seen(instances) - self._state.table.quarantined.keys(), key=device_order)

    def _parts(self, demand: Demand) -> int:
        """How many parts a machine's devices are divided into: runs of this demand that the instances suffice for."""
        if not demand.scores:
            return max(1, self._count("trainer") // demand.trainers)
        rollouts = self._count("rollout") // max(demand.fewest_rollouts, 1)
        if not demand.trainers:
            return max(1, rollouts)
        return max(1, min(rollouts, self._count("trainer") // demand.trainers))

    def _count(self, kind: str) -> int:
        return sum(i.kind == kind and not i.draining for i in self._state.instances.values())


def simulators(instances: Iterable[InstanceState], backend: str) -> list[InstanceState]:
    """Simulators that offer a backend and were not told to stop; they serve many runs at once."""
    return [
        i for i in instances if i.kind == "simulator" and not i.draining and _has(i, {"backends": backend})
    ]


def _held_by(runs: Iterable[str]) -> str:
    names = sorted(set(runs))
    return f"; held by {', '.join(names)}" if names else ""


def _has(instance: InstanceState, facets: dict[str, str]) -> bool:
    """Whether an instance offers what is named; an instance that declares nothing of a facet is assumed to offer it."""
    return all(
        not instance.capabilities.get(facet) or name in instance.capabilities[facet]
        for facet, name in facets.items()
    )
