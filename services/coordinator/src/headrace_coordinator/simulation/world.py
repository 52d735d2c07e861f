"""One seeded world: an imaginary fleet, scripted faults, the real coordinator, and the guarantees checked."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_schema.spec import RunSpec

from headrace_coordinator.coordinator import Coordinator
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import runs
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet import Fleet, FleetSettings, Supervisor, open_reports
from headrace_coordinator.history import History, Item
from headrace_coordinator.kernel import Kernel
from headrace_coordinator.simulation.disk import Disk, Weights
from headrace_coordinator.simulation.instances import Instance
from headrace_coordinator.simulation.judge import Violation, judge
from headrace_coordinator.simulation.network import SimulatedPort
from headrace_coordinator.simulation.reward import Reward
from headrace_coordinator.simulation.rollout import Rollout
from headrace_coordinator.simulation.trainer import Trainer
from headrace_coordinator.simulation.virtual_time import run_virtual
from headrace_coordinator.store.memory_store import MemoryStore

HOST = "host"
SETTINGS = FleetSettings()
LIMIT_S = 20_000.0
CLASSES: dict[str, type[Instance]] = {"rollout": Rollout, "trainer": Trainer, "reward": Reward}


class Quiet:
    """A projection that keeps nothing."""

    def spec(self, spec: object) -> None:
        """See `Projection.spec`."""

    def step(self, view: object) -> None:
        """See `Projection.step`."""

    def evaluation(self, view: object) -> None:
        """See `Projection.evaluation`."""

    def trajectories(self, views: object) -> None:
        """See `Projection.trajectories`."""

    def close(self) -> None:
        """See `Projection.close`."""


@dataclass
class Outcome:
    """What a world ended with."""

    seed: int
    state: str
    recoveries: int
    trained: int
    dropped: int
    virtual_s: float
    faults: Counter[str] = field(default_factory=Counter)


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, faults: bool = True) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faulty = faults
        self.store = MemoryStore()
        self.disk = Disk()
        self._temporary = tempfile.TemporaryDirectory(prefix="world-")
        self.directory = Path(self._temporary.name)
        self.spec = self._spec()
        self.instances: dict[str, Instance] = {}
        self.ended: runs.RunState | None = None
        self.history: list[Item] = []
        self.counts = {
            "rollout": self.spec.rollout.instances,
            "trainer": self.spec.trainer.ranks,
            "reward": 1,
        }
        self.faults: Counter[str] = Counter()
        self.ports: list[SimulatedPort] = []
        self._born = 0
        self.killed_in_order = 0
        self._wall_ahead_s = 1e9
        self._slept_s = 0.0
        self._coordinator: Coordinator | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def _spec(self) -> RunSpec:
        rng = self.rng
        return RunSpec.model_validate(
            {
                "name": "simulated",
                "steps": rng.randint(3, 7),
                "seed": self.seed,
                "deterministic": rng.random() < 0.2,
                "model": {"path": "imaginary"},
                "data": {"source": "copy_digits", "options": {"digits": 1}, "heldout": 2},
                "algorithm": {"group_size": rng.randint(2, 4), "prompts_per_step": rng.choice([2, 4])},
                "rollout": {"instances": rng.randint(1, 2)},
                "trainer": {"ranks": rng.choice([1, 1, 2])},
                "reward": {"scorers": [{"name": "exact"}]},
                "placement": {"mode": rng.choice(["collocated", "disaggregated"])},
                "checkpoint": {"interval_steps": rng.randint(1, 3)},
                "evaluation": {"every": rng.choice([0, 2])},
                "limits": {
                    "max_drop_rate": 0.9,
                    "recoveries": 50,
                    "in_flight_bytes": rng.choice([200, 10**7]),
                },
            }
        )

    # --- the fleet

    async def bear(self, kind: str, name: str) -> None:
        """Starts a process; it registers and keeps its session for as long as it lives."""
        self._born += 1
        incarnation = f"{name}#{self._born}"
        devices = tuple(f"{HOST}/cpu:{i}" for i in range(4)) if kind != "reward" else ()
        instance = CLASSES[kind](name, incarnation, random.Random(f"{self.seed}/{incarnation}"), devices)
        if isinstance(instance, Trainer):
            instance.disk = self.disk
        self.instances[incarnation] = instance
        self._spawn(self._lifeline(instance))

    def _spawn(self, work: Any) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def _lifeline(self, instance: Instance) -> None:
        """Register, then heartbeats; again after every interruption."""
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        while instance.alive:
            fleet = self._fleet()
            if fleet is None or instance.cut_off:
                await asyncio.sleep(0.5)
                continue
            state = InstanceState(
                instance.name,
                instance.incarnation,
                instance.KIND,
                HOST,
                f"{HOST}:1",
                list(instance.devices),
                {},
            )
            stale = await fleet.register(state, list(instance.held), instance.coordinator_epoch)
            for epoch in stale:
                instance.held.pop(epoch, None)
            self._report(instance, fleet)
            if fleet is self._fleet():
                await self._session(instance, fleet)

    async def _session(self, instance: Instance, fleet: Fleet) -> None:
        commands: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

        def send(command: str, body: Any) -> None:
            commands.put_nowait((command, body))

        async def obey() -> None:
            while True:  # One after the other: a session is a stream.
                await self._command(instance, fleet, *await commands.get())

        obeying = asyncio.ensure_future(obey())
        self._tasks.append(obeying)
        fleet.attach(instance.incarnation, send)
        silence = 0.0
        while instance.alive and fleet is self._fleet() and silence < 15.0:
            sent = asyncio.get_running_loop().time()
            if not instance.cut_off:
                silence = 0.0
                if instance.incarnation not in fleet.kernel.state.instances:
                    break
                self._report(instance, fleet)
                renewed, stale = fleet.heartbeat(instance.incarnation, list(instance.held), 0)
                for epoch in renewed:
                    instance.deadlines[epoch] = sent + SETTINGS.lease_ttl - 5.0
                for epoch in stale:
                    instance.held.pop(epoch, None)
            await asyncio.sleep(SETTINGS.heartbeat)
            silence += SETTINGS.heartbeat if instance.cut_off else 0.0
        obeying.cancel()
        fleet.detach(instance.incarnation, send)

    def _report(self, instance: Instance, fleet: Fleet) -> None:
        fleet.reported(instance.incarnation, open_reports(instance.open_runs.reports()))

    async def _command(self, instance: Instance, fleet: Fleet, command: str, body: Any) -> None:
        sent = asyncio.get_running_loop().time()
        await asyncio.sleep(self.rng.uniform(0.001, 0.05))
        if not instance.alive or instance.cut_off or fleet is not self._fleet():
            return
        if command == "grant":
            instance.held[body.epoch] = tuple(body.devices)
            instance.deadlines[body.epoch] = sent + SETTINGS.lease_ttl - 5.0
            self._exclusive()
            fleet.desk.held(instance.incarnation, body.epoch, "")
        elif command == "revoke":
            instance.held.pop(body[0], None)
            if isinstance(instance, Rollout):
                instance.revoke(body[0])
            await asyncio.sleep(self.rng.uniform(0.0, 0.05))
            fleet.desk.released(instance.incarnation, body[0])

    def _exclusive(self) -> None:
        used = Counter(device for instance in self.instances.values() for device in instance.using())
        doubled = [device for device, count in used.items() if count > 1]
        if doubled:
            raise Violation(f"G4: {doubled} are used by two live holders")

    # --- the coordinator

    def _fleet(self) -> Fleet | None:
        return self._coordinator.fleet if self._coordinator else None

    async def start_coordinator(self) -> None:
        """Opens the store, and the supervisor reports what it runs."""
        loop = asyncio.get_running_loop()
        kernel = Kernel(
            self.store,
            lambda: loop.time() + self._wall_ahead_s,
            lambda: loop.time() + self._slept_s,
            history=History(self.directory, _at_once),
        )
        await kernel.open("simulated")
        fleet = Fleet(kernel, self._connect, SETTINGS)
        coordinator = Coordinator(kernel, fleet, Path("/simulated"), lambda _: Quiet(), self._dataset)
        self._background = [
            asyncio.ensure_future(work) for work in (kernel.run(), fleet.sweep(), coordinator.schedule())
        ]
        self._coordinator = coordinator
        alive = frozenset(i.incarnation for i in self.instances.values() if i.alive)
        fleet.supervised(Supervisor(HOST, self._supervisor_command, frozenset(), alive))
        self._keep_table(fleet)

    def _keep_table(self, fleet: Fleet) -> None:
        alive = frozenset(i.incarnation for i in self.instances.values() if i.alive)
        fleet.supervisors[HOST] = Supervisor(HOST, self._supervisor_command, frozenset(), alive)

    async def _dataset(self, spec: RunSpec) -> Dataset:
        return Dataset.open(spec.data, spec.seed)

    def _connect(self, kind: str, address: str, incarnation: str) -> SimulatedPort:
        seed = f"{self.seed}/port/{incarnation}"
        port = SimulatedPort(self.instances[incarnation], random.Random(seed), self.faulty)
        self.ports.append(port)
        return port

    async def kill_coordinator(self, down_s: float) -> None:
        """SIGKILL: tasks vanish, what was not appended is lost; a new one starts after `down_s`."""
        dead, self._coordinator = self._coordinator, None
        for task in (*self._background, *(dead.scheduler.tasks.values() if dead else ())):
            task.cancel()
        await asyncio.sleep(down_s)
        await self.start_coordinator()

    def _supervisor_command(self, command: str, body: Any) -> None:
        if command == "kill":
            self.killed_in_order += 1
            self._spawn(self.kill(body[1]))

    async def kill(self, incarnation: str) -> None:
        """SIGKILL of an instance; its supervisor notices, reports and restarts it."""
        instance = self.instances[incarnation]
        if not instance.alive:
            return
        instance.die()
        await asyncio.sleep(self.rng.uniform(0.01, 0.3))
        if fleet := self._fleet():
            self._keep_table(fleet)
            fleet.exited(incarnation, "killed")
        await asyncio.sleep(self.rng.uniform(0.2, 3.0))
        await self.bear(instance.KIND, instance.name)
        if fleet := self._fleet():
            self._keep_table(fleet)

    # --- faults

    async def trouble(self) -> None:
        """Faults at random times, until it has been enough."""
        for _ in range(self.rng.randint(2, 7)):
            await asyncio.sleep(self.rng.expovariate(1 / 6.0))
            fault = self.rng.choice(
                [
                    *["kill"] * 3,
                    "coordinator",
                    "store",
                    "partition",
                    "pause",
                    "reply",
                    "stop",
                    "clock",
                    "sleep",
                    "damage",
                ]
            )
            self.faults[fault] += 1
            await getattr(self, f"_fault_{fault}")()

    def _victim(self) -> Instance:
        return self.rng.choice([i for i in self.instances.values() if i.alive])

    async def _fault_kill(self) -> None:
        await self.kill(self._victim().incarnation)

    async def _fault_coordinator(self) -> None:
        await self.kill_coordinator(self.rng.uniform(0.1, 5.0))

    async def _fault_store(self) -> None:
        self.store.away = True
        await asyncio.sleep(self.rng.uniform(0.5, 40.0))
        self.store.away = False

    async def _fault_reply(self) -> None:
        self.store.lose_replies = True

    async def _fault_clock(self) -> None:
        """The wall clock is set, by up to a day either way."""
        self._wall_ahead_s += self.rng.uniform(-86_400.0, 86_400.0)

    async def _fault_sleep(self) -> None:
        """The machine sleeps: leases' clocks go on, timers and work stand still; nobody may be declared lost."""
        slept, kills = self.rng.uniform(1.0, 600.0), self.killed_in_order
        self._slept_s += slept
        for instance in self.instances.values():
            instance.deadlines = {epoch: at - slept for epoch, at in instance.deadlines.items()}
        await asyncio.sleep(SETTINGS.heartbeat)
        if slept > 2 * SETTINGS.heartbeat and self.killed_in_order != kills:
            raise Violation(f"a sleep of {slept:.0f} s was taken for the silence of an instance")

    async def _fault_partition(self) -> None:
        victim = self._victim()
        victim.cut_off = True
        await asyncio.sleep(self.rng.uniform(1.0, 60.0))
        victim.cut_off = False

    async def _fault_damage(self) -> None:
        """The newest checkpoint is damaged; an intact one is before it."""
        run = self._run()
        if run is None:
            return
        live = {number for number, version in run.lineage.versions.items() if version.live}
        listed = self.disk.listed(run.directory)
        intact = [c for c in listed if not c.damage and c.version.number in live]
        if len(intact) > 1:
            intact[0].damage, intact[0].torn = "a byte differs", self.rng.random() < 0.5

    async def _fault_stop(self) -> None:
        victim = self._victim()
        if isinstance(victim, Rollout):
            victim.stop()

    async def _fault_pause(self) -> None:
        run = self._run()
        if self._coordinator is None or run is None or run.state not in (runs.RUNNING, runs.PLANNING):
            return
        await self._coordinator.pause(
            run.id, now=self.rng.random() < 0.5, idempotency_key=f"p{self.rng.random()}"
        )
        while run is not None and run.state not in (runs.PAUSED, *runs.TERMINAL):
            await asyncio.sleep(0.5)
            run = self._run() or run
        while run is not None and run.state == runs.PAUSED and run.intent != runs.RUN:
            if self._coordinator is not None:
                await self._coordinator.resume(run.id, f"r{self.rng.random()}")
            await asyncio.sleep(0.5)
            run = self._run() or run

    # --- the run and its end

    def _run(self) -> runs.RunState | None:
        states = self._coordinator.kernel.state.runs if self._coordinator else {}
        return next(iter(states.values()), None)

    async def live(self) -> Outcome:
        """From the first process to the end of the run, with every check."""
        for kind, count in self.counts.items():
            for index in range(count):
                await self.bear(kind, f"{kind}-{index}")
        await self.start_coordinator()
        assert self._coordinator is not None
        now = self._coordinator.kernel.now()
        await self._coordinator.kernel.commit(
            ev.RunSubmitted(
                at=now, run="run", spec=self.spec.model_dump(mode="json"), directory="/simulated/run"
            )
        )
        trouble = asyncio.ensure_future(self.trouble()) if self.faulty else None
        while not ((run := self._run()) and run.state in runs.TERMINAL and self._settled()):
            await asyncio.sleep(0.25)
            self._exclusive()
            self._surface(trouble)
            if asyncio.get_running_loop().time() > LIMIT_S:
                waiting = self._coordinator.fleet.waits.of("run") if self._coordinator else "no coordinator"
                raise Violation(
                    f"liveness: the run is {run and run.state} after {LIMIT_S} s; waits for {waiting}"
                )
        if trouble:
            trouble.cancel()
        return await self._judge(run)

    def _settled(self) -> bool:
        kernel = self._coordinator.kernel if self._coordinator else None
        return kernel is not None and not kernel._pending

    def _surface(self, trouble: asyncio.Future[None] | None) -> None:
        """An error in any task of the world is the world's error."""
        for task in (*self._tasks, *self._background, *([trouble] if trouble else [])):
            if task.done() and not task.cancelled() and task.exception():
                raise task.exception()  # type: ignore[misc]
        self._tasks = [task for task in self._tasks if not task.done()]

    async def _judge(self, run: runs.RunState) -> Outcome:
        assert self._coordinator is not None
        self.ended, self.history = run, await self._history(run.id)
        counts = judge(run, self.history, self._weights(run.lineage.head))
        await self._archived(run)
        return Outcome(
            self.seed,
            run.state,
            run.recoveries,
            counts.trained,
            counts.dropped,
            asyncio.get_running_loop().time(),
            self.faults,
        )

    async def _history(self, run: str) -> list[Item]:
        """The run's events as anyone may read them: files first, then what is still in memory."""
        assert self._coordinator is not None
        found: list[Item] = []
        while page := await self._coordinator.kernel.history.page(run, found[-1][0] if found else -1):
            found += page
        return found

    async def _archived(self, run: runs.RunState) -> None:
        """The run leaves memory, and shows what it showed before."""
        coordinator = self._coordinator
        assert coordinator is not None
        shown = coordinator.run(run.id)
        await coordinator.kernel.wait_until(
            lambda: not coordinator.scheduler.tasks, 60.0, "the run's task to end"
        )
        await coordinator.archive.once()
        if run.id in coordinator.kernel.state.runs or coordinator.run(run.id) != shown:
            raise Violation("an archived run shows something else")

    def _weights(self, head: int) -> Weights | None:
        """The head's weights: in a living trainer, or on the disk when the trainer died last."""
        trainers = [i for i in self.instances.values() if isinstance(i, Trainer) and i.alive]
        found = [trainer.made[head] for trainer in trainers if head in trainer.made]
        found += [stored.weights for stored in self.disk.checkpoints if stored.version.number == head]
        return found[0] if found else None


async def _at_once(work: Any, *arguments: Any) -> Any:
    """In place of a thread, for which virtual time would not wait."""
    return work(*arguments)


def run_world(seed: int, faults: bool = True) -> Outcome:
    """One seed, start to end; raises `Violation`."""
    return run_virtual(World(seed, faults).live())
