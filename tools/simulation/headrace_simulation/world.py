"""One seeded world: a simulated fleet, users, scripted faults, the real coordinator, and the guarantees checked."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from headrace_coordinator.app import Coordinator
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import runs
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.run.context import Projection
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import History
from headrace_coordinator.store.run_files import Item
from headrace_schema.spec import RunSpec
from typing_extensions import override

from headrace_simulation.faults import WALL_S, Faults
from headrace_simulation.fleet.processes import SETTINGS, Processes
from headrace_simulation.judging.judge import Violation
from headrace_simulation.judging.replay import RecordingStore, Replay, nothing_held
from headrace_simulation.judging.world import Outcome, WorldJudge
from headrace_simulation.moves import moving
from headrace_simulation.regroupers import regroups
from headrace_simulation.specs import (
    DEVICES_A_HOST,
    ON_GPUS,
    ahead,
    random_spec,
    ranged,
    robots,
    scarce,
    spanning,
)
from headrace_simulation.users import Users
from headrace_simulation.virtual_time import run_virtual

LIMIT_S = 20_000.0
LEADERS_KILLED = 3
SETTLED_S = 240.0
"""Seconds after the end of the last run within which everything must be closed and released."""


class Quiet(Projection):
    """A projection that writes nothing."""

    trouble = ""

    @override
    def spec(self, spec: object) -> None: ...

    @override
    def step(self, view: object) -> None: ...

    @override
    def evaluation(self, view: object) -> None: ...

    @override
    def trajectories(self, views: object, images: object = None) -> None: ...

    @override
    def timeline(self, part: object) -> None: ...

    @override
    def close(self) -> None: ...


class World(Processes):
    """Everything of one seed. Without faults: one run and calm users, or `count` runs that compete.

    `evaluations` of suites beside the runs; None: as many as the seed says, without faults none. `stale`: every run
    that may has answers of older versions. Where `leaders_die`, leaders of several ranks are killed as these meet,
    LEADERS_KILLED times at most. With `containers` each process is in one, and some are removed: nobody says so.
    """

    def __init__(
        self,
        seed: int,
        faults: bool = True,
        count: int = 0,
        evaluations: int | None = None,
        stale: bool = False,
        *,
        leaders_die: bool = False,
        containers: bool = False,
    ) -> None:
        sizes = random.Random(f"{seed}/sizes")
        super().__init__(seed, faults, sizes.choice([1, 1, 2]) if faults else 1)
        self.store = RecordingStore()
        self._temporary = tempfile.TemporaryDirectory(prefix="world-")
        self.directory = Path(self._temporary.name)
        self.data_dir = str(self.directory / "data")
        some = random.Random(f"{seed}/evaluators").choice([0, 0, 1, 2]) if faults else 0
        self.evaluations = some if evaluations is None else evaluations
        count = count or (sizes.choice([1, 2, 2, 3, 4]) if faults else 1)
        self.specs = [random_spec(self.rng, seed, "run" if not i else f"run{i}") for i in range(count)]
        if faults:
            self.specs = [ranged(ahead(robots(spec, seed), seed, always=stale), seed) for spec in self.specs]
            if seed % 32 == ON_GPUS or (containers and seed % 2):
                self.gpus, self.specs = True, [spanning(spec, seed) for spec in self.specs]
        if containers:
            self.devices_a_host = scarce(self.specs, DEVICES_A_HOST)
        self.spare = {
            kind: sizes.choice([0, 0, 1, 2]) if faults else 0 for kind in ("rollout", "trainer", "reward")
        } | {"simulator": 0}
        if faults and regroups(seed):
            self.spare |= {"rollout": 2, "trainer": 2}  # What some run takes beyond its need, and gives back.
        self.counts: dict[str, int] = {}
        self._meetings = random.Random(f"{seed}/meetings") if leaders_die else None
        self._leaders_killed = 0
        self._removals = random.Random(f"{seed}/containers") if containers else None
        self.wall_ahead_s = WALL_S
        self.slept_s = 0.0
        self.coordinator: Coordinator | None = None
        self.replay: Replay | None = None
        self.ended: runs.RunState | None = None
        self.history: list[Item] = []
        self._named = 0
        self._arrived = asyncio.Event()
        self._retired: asyncio.Future[None] | None = None
        self._background: list[asyncio.Future[Any]] = []
        self._unwanted: dict[tuple[str, str], float] = {}

    @property
    def spec(self) -> RunSpec:
        """The spec of the first run."""
        return self.specs[0]

    @spec.setter
    def spec(self, spec: RunSpec) -> None:
        self.specs[0] = spec

    @property
    def needed(self) -> dict[str, int]:
        """The fewest processes by kind that can run every spec, and any two at once that share."""
        together = 2 if any(spec.placement.share for spec in self.specs) else 1
        return {
            "rollout": sum(
                sorted(spec.rollout.instances + spec.rollout.helpers for spec in self.specs)[-together:]
            ),
            "trainer": sum(
                sorted(spec.trainer.ranks + spec.trainer.helpers for spec in self.specs)[-together:]
            ),
            "reward": 1,
            "simulator": max(2 * bool(spec.environment) for spec in self.specs),
        }

    @override
    def meets(self, incarnation: str, rank: int, world_size: int) -> None:
        draw = self._meetings
        if (
            draw is None
            or rank
            or world_size < 2
            or self._leaders_killed >= LEADERS_KILLED
            or draw.random() < 0.3
        ):
            return
        self._leaders_killed += 1
        self.spawn(self._dies(incarnation, draw.choice([0.0, 0.0, 0.05, 0.2, 1.0])))

    async def _dies(self, incarnation: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.faults.counts["leader"] += 1
        await self.kill(incarnation)

    # --- the coordinator

    def _fleet(self) -> Fleet | None:
        return self.coordinator.fleet if self.coordinator else None

    async def start_coordinator(self) -> None:
        """Starts a coordinator on the store; the supervisors report their processes to it."""
        loop = asyncio.get_running_loop()
        while self.store.away:  # noqa: ASYNC110 - virtual time: a look costs nothing
            await asyncio.sleep(0.2)
        event_log = EventLog(
            self.store,
            lambda: loop.time() + self.wall_ahead_s,
            lambda: loop.time() + self.slept_s,
            history=History(Path(self.data_dir) / "runs", _at_once, synced=False),
        )
        await event_log.open("simulated")
        fleet = Fleet(event_log, self.connect, SETTINGS)
        coordinator = Coordinator(
            event_log,
            fleet,
            Path(self.data_dir),
            lambda _, __: Quiet(),
            self._dataset,
            self._dataset,
            new_id=self._new_id,
        )
        lasting = (event_log.run(), fleet.sweep(), coordinator.scheduler.run(), coordinator.archive.run())
        self._background = [asyncio.ensure_future(work) for work in lasting]
        self.coordinator, self._retired = coordinator, loop.create_future()
        self._arrived.set()
        self.tell_tables(fleet, first=True)

    def _new_id(self) -> str:
        self._named += 1
        return f"{self._named:06x}"

    async def _dataset(self, spec: RunSpec) -> Dataset:
        return Dataset.open(spec.data, spec.seed)

    async def kill_coordinator(self, down_s: float) -> None:
        """SIGKILL: tasks vanish, what was not appended is lost; a new one starts after `down_s`."""
        if self.coordinator is None:
            return
        dead, self.coordinator = self.coordinator, None
        self._arrived.clear()
        if self._retired is not None:
            self._retired.set_result(None)
        closing = list(dead.reconciler._closing.values())
        for task in (*self._background, *dead.scheduler.tasks.values(), *closing):
            task.cancel()
        await asyncio.sleep(down_s)
        await self.start_coordinator()

    async def serving(self) -> tuple[Coordinator, asyncio.Future[None]]:
        """The present coordinator, and a future that is done when it is killed."""
        await self._arrived.wait()
        assert self.coordinator is not None and self._retired is not None
        return self.coordinator, self._retired

    # --- the runs and their end

    def states(self) -> list[runs.RunState]:
        """The runs that have not ended, in the order of their submission."""
        return list(self.coordinator.event_log.state.active_runs()) if self.coordinator else []

    def _run(self) -> runs.RunState | None:
        """The first run while the coordinator has it in memory."""
        known = self.coordinator.event_log.state.runs if self.coordinator else {}
        return next(iter(known.values()), None)

    @override
    def heard(self, method: str, request: Any) -> None:
        self.users.heard(method, request)

    async def trouble(self) -> None:
        """Makes faults at random times, as many as the seed says."""
        if self.faulty and self._removals is not None:
            await asyncio.gather(self.faults.happen(), self.faults.remove_containers(self._removals))
        elif self.faulty:
            await self.faults.happen()

    async def live(self) -> Outcome:
        """Runs the world from its first process to the end of its last run; raises `Violation` when a check fails."""
        self.faults = Faults(self, random.Random(f"{self.seed}/faults"))
        self.users = Users(self, random.Random(f"{self.seed}/users"), calm=not self.faulty)
        machines = list(self.hosts)
        for kind, fewest in self.needed.items():
            for index in range(self.counts.get(kind, fewest + self.spare[kind])):
                host = machines[index % len(machines)]
                place = host if self._removals is None else self.container_on(host)
                await self.bear(kind, f"{kind}-{index}", place)
        await self.start_coordinator()
        trouble = asyncio.ensure_future(self.trouble())
        living = asyncio.ensure_future(self.users.live())
        await self._watch(living.done, [living, trouble], LIMIT_S)
        trouble.cancel()
        await self._settle()
        return await WorldJudge(self).judge()

    async def _watch(self, over: Any, tasks: list[asyncio.Future[Any]], limit_s: float) -> None:
        while not (over() and self._settled()):
            await asyncio.sleep(0.25)
            self.exclusive()
            self._watch_openings()
            self._surface(tasks)
            if asyncio.get_running_loop().time() > limit_s:
                raise Violation(f"liveness: after {limit_s:.0f} s {self._stuck()}")

    def _stuck(self) -> str:
        if self.coordinator is None:
            return "there is no coordinator"
        waits, queue = self.coordinator.fleet.waits, self.coordinator.scheduler.plan.waiting
        return "; ".join(
            f"{run.id} is {run.state}, wanted {run.intent}, waits for {waits.of(run.id) or queue.get(run.id)}"
            for run in self.states()
        )

    def _settled(self) -> bool:
        event_log = self.coordinator.event_log if self.coordinator else None
        return event_log is not None and not event_log._pending

    def _surface(self, tasks: list[asyncio.Future[Any]]) -> None:
        """Raises the error of any task of the world."""
        for task in (*self._tasks, *self._background, *tasks):
            if task.done() and not task.cancelled() and task.exception():
                raise task.exception()  # type: ignore[misc]
        self._tasks = [task for task in self._tasks if not task.done()]

    def _watch_openings(self) -> None:
        """Raises `Violation` when an instance in reach keeps a run open that no run wants, for SETTLED_S."""
        now, seen = asyncio.get_running_loop().time(), set[tuple[str, str]]()
        coordinator = self.coordinator
        if coordinator is None or self.store.away:
            self._unwanted.clear()
            return
        for instance in self.instances.values():
            if not instance.alive or instance.cut_off:
                continue
            state = coordinator.event_log.state.instances.get(instance.incarnation)
            for name in instance.open_runs.names() if state else ():
                if state and not coordinator.reconciler.wanted(state, name.removeprefix("runs/")):
                    seen.add((instance.incarnation, name))
        self._unwanted = {key: self._unwanted.get(key, now) for key in seen}
        late = [key for key, since in self._unwanted.items() if now - since > SETTLED_S]
        if late:
            raise Violation(f"openings: nobody wants {late} for {SETTLED_S:.0f} s, and they are open")

    async def _settle(self) -> None:
        """Ends the faults and waits until nothing is open or held; raises `Violation` after SETTLED_S."""
        self.store.away = self.disk.full = False
        for instance in self.instances.values():
            instance.cut_off = instance.stranded
        end = asyncio.get_running_loop().time() + SETTLED_S
        while left := self._left():
            await asyncio.sleep(1.0)
            self._surface([])
            if asyncio.get_running_loop().time() > end:
                raise Violation(f"after the last run: {left}")

    def _left(self) -> list[str]:
        if self.coordinator is None or not self._settled():
            return ["no coordinator, or one that has not written all"]
        left = nothing_held(self.coordinator.event_log.state.table)
        for instance in self.instances.values():
            if instance.alive and not instance.stranded:
                left += [f"{instance.incarnation} has {name} open" for name in instance.open_runs.names()]
                left += [f"{instance.incarnation} holds lease {epoch}" for epoch in instance.held]
        return left + list(self.coordinator.scheduler.tasks)


async def _at_once(work: Any, *arguments: Any) -> Any:
    """Does the work at once in place of a thread, for which virtual time would not wait."""
    return work(*arguments)


def run_world(
    seed: int,
    faults: bool = True,
    count: int = 0,
    evaluations: int | None = None,
    stale: bool = False,
    *,
    leaders_die: bool = False,
    containers: bool = False,
) -> Outcome:
    """Runs the world of one seed; raises `Violation`."""
    with moving(seed):
        world = World(seed, faults, count, evaluations, stale, leaders_die=leaders_die, containers=containers)
        return run_virtual(world.live())
