"""Faults of a world at random moments: processes, coordinator, store, network, clocks, disk."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

from headrace_simulation.fleet.instances import Instance
from headrace_simulation.fleet.processes import SETTINGS
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.judging.judge import Violation

if TYPE_CHECKING:
    from headrace_simulation.world import World

WALL_S = 1e9
"""The wall clock of a world when it begins."""
KINDS = [
    *["kill"] * 3, "two", "coordinator", "store", "partition", "reply", "stop", "clock", "sleep", "damage", "missing",
    "full", "leave",
]  # fmt: skip


class Faults:
    """The faults of one world, counted by name."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._world = world
        self._rng = rng
        self._left: Counter[str] = Counter()

    async def happen(self) -> None:
        """Makes faults at random times, as many as the seed says."""
        for _ in range(self._rng.randint(2, 7) + 2 * len(self._world.specs)):
            await asyncio.sleep(self._rng.expovariate(1 / 6.0))
            fault = self._rng.choice(KINDS)
            self.counts[fault] += 1
            await getattr(self, f"_{fault}")()

    async def remove_containers(self, rng: random.Random) -> None:
        """Removes containers in mid-run; another one on the same machine comes in place of each."""
        for _ in range(rng.randint(1, 4)):
            await asyncio.sleep(rng.expovariate(1 / 10.0))
            while not (at_work := [each for each in self._world.living() if each.held]):  # noqa: ASYNC110 - virtual
                await asyncio.sleep(rng.uniform(0.1, 1.0))
            self.counts["remove"] += 1
            self._world.spawn(self._remove(rng.choice(at_work), rng))

    async def _remove(self, victim: Instance, rng: random.Random) -> None:
        world, lives_on_s = self._world, rng.choice([0.0, rng.uniform(1.0, 400.0)])
        coming = self._come(victim.KIND, world.container_on(victim.host), rng.uniform(0.5, 20.0))
        world.spawn(coming)
        told = rng.random() < 0.3
        await world.remove(victim.host, lives_on_s)
        await asyncio.sleep(rng.uniform(1.0, 40.0))
        if told and (fleet := world._fleet()):
            fleet.hosts_gone([victim.host])

    async def _kill(self) -> None:
        if living := self._world.living():
            await self._world.kill(self._rng.choice(living).incarnation)

    async def _two(self) -> None:
        """Two processes at once, of two runs where there are two."""
        living = self._world.living()
        for victim in self._rng.sample(living, min(2, len(living))):
            self._world.spawn(self._world.kill(victim.incarnation))

    async def _coordinator(self) -> None:
        await self._world.kill_coordinator(self._rng.uniform(0.1, 5.0))

    async def _store(self) -> None:
        self._world.store.away = True
        await asyncio.sleep(self._rng.uniform(0.5, 40.0))
        self._world.store.away = False

    async def _reply(self) -> None:
        self._world.store.lose_replies = True

    async def _clock(self) -> None:
        """The wall clock is set: by less than the lifetime of an Idempotency-Key, all steps together."""
        self._world.wall_ahead_s = WALL_S + self._rng.uniform(-36_000.0, 36_000.0)

    async def _sleep(self) -> None:
        """The machine sleeps: leases' clocks go on, timers and work stand still; nobody may be declared lost."""
        world = self._world
        slept, kills = self._rng.uniform(1.0, 600.0), world.killed_as_silent
        world.slept_s += slept
        for instance in world.instances.values():
            instance.deadlines = {epoch: at - slept for epoch, at in instance.deadlines.items()}
        await asyncio.sleep(SETTINGS.heartbeat)
        if slept > 2 * SETTINGS.heartbeat and world.killed_as_silent != kills:
            raise Violation(f"a sleep of {slept:.0f} s was taken for the silence of an instance")

    async def _partition(self) -> None:
        if living := self._world.living():
            victim = self._rng.choice(living)
            victim.cut_off = True
            await asyncio.sleep(self._rng.uniform(1.0, 60.0))
            victim.cut_off = victim.stranded

    async def _damage(self) -> None:
        """The newest checkpoint of a run is damaged; an intact one is before it."""
        states = self._world.states()
        if not states:
            return
        run = self._rng.choice(states)
        live = {number for number, version in run.lineage.versions.items() if version.live}
        listed = self._world.disk.listed(run.directory)
        intact = [c for c in listed if not c.damage and c.version.number in live]
        if len(intact) > 1:
            self._world.disk.harmed.add(run.directory)
            intact[0].damage, intact[0].torn = "a byte differs", self._rng.random() < 0.5

    async def _missing(self) -> None:
        """A run's directory is moved away and its trainer dies; somebody puts it back later."""
        world = self._world
        held = [run for run in world.states() if run.grant and world.disk.listed(run.directory)]
        if not held:
            return
        run = self._rng.choice(held)
        world.disk.move_away(run.directory)
        trainers = run.grant.trainers if run.grant else []
        for incarnation in trainers[:1]:
            world.spawn(world.kill(incarnation))
        await asyncio.sleep(self._rng.uniform(5.0, 60.0))
        world.disk.put_back(run.directory)

    async def _full(self) -> None:
        self._world.disk.full = True
        await asyncio.sleep(self._rng.uniform(1.0, 30.0))
        self._world.disk.full = False

    async def _leave(self) -> None:
        """An instance is told to stop and does not come back; where it is missed, another one comes later."""
        world = self._world
        living = world.living()
        if not living:
            return
        leaver = self._rng.choice(living)
        world.spawn(world.terminate(leaver, self._rng.uniform(5.0, 120.0)))
        self._left[leaver.KIND] += 1
        spare = world.spare[leaver.KIND] - self._left[leaver.KIND]
        if spare < 0 or self._rng.random() < 0.5:
            self._left[leaver.KIND] -= 1
            host = world.container_on(leaver.host) if world.machines else leaver.host
            world.spawn(self._come(leaver.KIND, host, self._rng.uniform(5.0, 90.0)))

    async def _come(self, kind: str, host: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        world = self._world
        await world.bear(kind, f"{kind}-new{len(world.instances)}", host)
        if fleet := world._fleet():
            world.tell_tables(fleet)

    async def _stop(self) -> None:
        if living := self._world.living():
            victim = self._rng.choice(living)
            if isinstance(victim, Rollout):
                victim.stop()
