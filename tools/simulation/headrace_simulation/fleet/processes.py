"""The processes of a world: born, registered, commanded, killed, told to stop, and watched by supervisors."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.fleet.sessions import FleetSettings, InstanceUsage, Supervisor, open_reports
from headrace_schema.rules.acting import PART_ERROR

from headrace_simulation.fleet.disk import Disk
from headrace_simulation.fleet.instances import Instance
from headrace_simulation.fleet.network import SimulatedInstanceClient
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.fleet.simulator import Simulator
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.fleet.trainer_group import TrainerGroups
from headrace_simulation.judging.judge import Violation
from headrace_simulation.specs import DEVICES_A_HOST

T = TypeVar("T")
SETTINGS = FleetSettings()
USED = 8 * 2**30
"""Bytes of a GPU that its holder uses."""
CLASSES: dict[str, type[Instance]] = {
    "rollout": Rollout,
    "trainer": Trainer,
    "reward": Reward,
    "simulator": Simulator,
}


class Processes(ABC):
    """All instances of a world. Subclasses say which fleet they belong to."""

    def __init__(self, seed: int, faulty: bool, hosts: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faulty = faulty
        self.hosts = [f"host{index}" for index in range(hosts)]
        """Where supervisors run: machines, and containers on them."""
        self.machines: dict[str, str] = {}
        """The machine of each container, whose devices it has."""
        self.devices_a_host = DEVICES_A_HOST
        self.gpus = False
        """Whether the hosts' devices are GPUs, on each of which one rank or engine computes."""
        self.disk = Disk()
        self.instances: dict[str, Instance] = {}
        self.clients: list[SimulatedInstanceClient] = []
        self.killed_as_silent = 0
        self._trainer_groups: TrainerGroups = {}
        self._helpers: dict[str, Trainer] = {}
        self._born = 0
        self._tasks: list[asyncio.Task[Any]] = []

    @abstractmethod
    def _fleet(self) -> Fleet | None:
        """The fleet of the coordinator that serves now."""

    @abstractmethod
    def heard(self, method: str, request: Any) -> None:
        """Called with each call of a coordinator to an instance."""

    @abstractmethod
    def meets(self, incarnation: str, rank: int, world_size: int) -> None:
        """A trainer comes to the meeting of its group."""

    # --- life

    async def bear(self, kind: str, name: str, host: str) -> None:
        """Starts a process; it registers and keeps its session for as long as it lives."""
        self._born += 1
        incarnation = f"{name}#{self._born:03}"
        machine = self.machines.get(host, host)
        devices = tuple(f"{machine}/{'gpu' if self.gpus else 'cpu'}:{i}" for i in range(self.devices_a_host))
        instance = CLASSES[kind](
            name, incarnation, random.Random(f"{self.seed}/{incarnation}"), devices, host
        )
        instance.slow = self.faulty
        if isinstance(instance, Trainer | Rollout):
            instance.disk = self.disk
        if isinstance(instance, Rollout):
            instance.peers = self.instances
        if isinstance(instance, Trainer):
            instance.trainer_groups, instance.helpers = self._trainer_groups, self._helpers
            instance.on_meeting = partial(self.meets, incarnation)
        self.instances[incarnation] = instance
        self.spawn(self._lifeline(instance))

    def container_on(self, host: str) -> str:
        """A new container on the machine of a host."""
        name = f"container{len(self.machines)}"
        self.machines[name] = self.machines.get(host, host)
        self.hosts.append(name)
        return name

    async def remove(self, container: str, lives_on_s: float) -> None:
        """Removes a container, as `docker rm -f` does: its supervisor and its processes are gone, and nobody says so.

        Above 0 its processes are out of reach and live on for so long: of a pod on a node that is cut off, say.
        """
        self.hosts.remove(container)
        if fleet := self._fleet():
            fleet.supervisors.pop(container, None)
        lost = [each for each in self.instances.values() if each.host == container and each.alive]
        for each in lost:
            each.draining = each.cut_off = each.stranded = True
        await asyncio.sleep(lives_on_s)
        for each in lost:
            each.die()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of the world; its error ends the world."""
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    def living(self, kind: str = "") -> list[Instance]:
        """Processes that run and were not told to stop."""
        return [i for i in self.instances.values() if i.alive and not i.draining and kind in ("", i.KIND)]

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
                instance.host,
                instance.incarnation,
                list(instance.devices),
                {},
                boot_id=self.machines.get(instance.host, ""),
            )
            stale = await self._answer(
                fleet,
                fleet.register(state, list(instance.held), instance.coordinator_epoch, instance.store_id),
            )
            if stale is None:
                continue
            instance.coordinator_epoch = max(instance.coordinator_epoch, fleet.event_log.state.epoch)
            instance.store_id = fleet.event_log.state.store_id
            for epoch in stale:
                instance.held.pop(epoch, None)
            self._report(instance, fleet)
            if fleet is self._fleet():
                await self._session(instance, fleet)

    async def _answer(self, fleet: Fleet, call: Coroutine[Any, Any, T]) -> T | None:
        """The answer of a call to the coordinator; None when that coordinator was killed meanwhile."""
        asked = asyncio.ensure_future(call)
        while not asked.done() and fleet is self._fleet():
            await asyncio.wait({asked}, timeout=0.5)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    async def _session(self, instance: Instance, fleet: Fleet) -> None:
        commands: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

        def send(command: str, body: Any) -> None:
            commands.put_nowait((command, body))

        async def obey() -> None:
            while True:  # In sequence, as a session is a stream.
                await self._command(instance, fleet, *await commands.get())

        obeying = self.spawn(obey())
        fleet.attach(instance.incarnation, send)
        silence = 0.0
        while instance.alive and fleet is self._fleet() and silence < 15.0:
            sent = asyncio.get_running_loop().time()
            if not instance.cut_off:
                silence = 0.0
                if instance.incarnation not in fleet.event_log.state.instances:
                    break
                self._report(instance, fleet)
                usage = self._usage(instance, fleet)
                renewed, stale = fleet.heartbeat(instance.incarnation, list(instance.held), usage)
                for epoch in renewed:
                    instance.deadlines[epoch] = sent + SETTINGS.lease_ttl - 5.0
                for epoch in stale:
                    instance.held.pop(epoch, None)
            await asyncio.sleep(SETTINGS.heartbeat)
            silence += SETTINGS.heartbeat if instance.cut_off else 0.0
        obeying.cancel()
        fleet.detach(instance.incarnation, send)

    def _usage(self, instance: Instance, fleet: Fleet) -> InstanceUsage:
        """What a heartbeat tells: in containers, the memory in use of the GPUs that the coordinator asks about."""
        if instance.host not in self.machines:
            return InstanceUsage()
        holders = [each for each in self.instances.values() if each.alive]
        held = {name for each in holders for names in each.held.values() for name in names}
        asked = fleet.quarantines.gpus_seen_by(instance.incarnation)
        return InstanceUsage(gpus=tuple((name, 0.0, USED * (name in held)) for name in asked))

    def _report(self, instance: Instance, fleet: Fleet) -> None:
        fleet.reported(instance.incarnation, open_reports(instance.open_runs.reports()))

    # --- commands of the coordinator

    async def _command(self, instance: Instance, fleet: Fleet, command: str, body: Any) -> None:
        sent = asyncio.get_running_loop().time()
        await asyncio.sleep(self.rng.uniform(0.001, 0.05))
        if not instance.alive or instance.cut_off or fleet is not self._fleet():
            return
        if command == "grant":
            instance.held[body.epoch] = tuple(body.devices)
            instance.parts[body.epoch] = body.memory_part
            instance.deadlines[body.epoch] = sent + SETTINGS.lease_ttl - 5.0
            instance.granted()
            self.exclusive()
            fleet.lease_manager.held(instance.incarnation, body.epoch, "")
        elif command == "revoke":
            instance.revoke(body[0], keep=body[2])
            await asyncio.sleep(self.rng.uniform(0.0, 0.05))
            fleet.lease_manager.released(instance.incarnation, body[0])
        elif command == "drain":
            self.spawn(self._end_in_order(instance))

    def exclusive(self) -> None:
        """Raises `Violation` when live holders use more than a device has (G4)."""
        used: Counter[str] = Counter()
        for instance in self.instances.values():
            used.update(instance.using())
        doubled = [device for device, part in used.items() if part > 1 + PART_ERROR]
        if doubled:
            raise Violation(f"G4: {doubled} are used by two live holders")

    # --- supervisors

    def tell_tables(self, fleet: Fleet, first: bool = False) -> None:
        """Each host's supervisor reports its processes; `first`: over a new connection."""
        for host in self.hosts:
            alive = frozenset(i.incarnation for i in self.instances.values() if i.alive and i.host == host)
            table = Supervisor(host, self._supervisor_command, frozenset(), alive)
            if first:
                fleet.supervised(table)
            fleet.supervisors[host] = table

    def _supervisor_command(self, command: str, body: Any) -> None:
        if command == "kill":
            self.killed_as_silent += "unheard of" in body[2] or "not renewed" in body[2]
            self.spawn(self.kill(body[1]))

    async def kill(self, incarnation: str) -> None:
        """SIGKILL of an instance; its supervisor notices, reports and restarts it unless it was told to stop."""
        instance = self.instances[incarnation]
        if not instance.alive:
            return
        await self._gone(instance, "killed")
        if instance.draining:
            return
        await asyncio.sleep(self.rng.uniform(0.2, 3.0))
        if instance.host not in self.hosts:
            return
        await self.bear(instance.KIND, instance.name, instance.host)
        if fleet := self._fleet():
            self.tell_tables(fleet)

    async def _gone(self, instance: Instance, reason: str) -> None:
        instance.die()
        await asyncio.sleep(self.rng.uniform(0.01, 0.3))
        if (fleet := self._fleet()) and instance.host in self.hosts:
            self.tell_tables(fleet)
            fleet.exited(instance.incarnation, reason)

    # --- orderly ends

    async def terminate(self, instance: Instance, grace_s: float) -> None:
        """SIGTERM: it opens no further run, and ends at the coordinator's Drain, or after its grace."""
        instance.draining = True
        fleet = self._fleet()
        connected = fleet is not None and instance.incarnation in fleet.sessions and not instance.cut_off
        if connected and instance.open_runs.names():
            assert fleet is not None
            fleet.draining(instance.incarnation, grace_s)
            await asyncio.sleep(grace_s)
        await self._end_in_order(instance)

    async def _end_in_order(self, instance: Instance) -> None:
        if not instance.alive or not instance.draining:
            return
        instance.drained()
        await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        fleet = self._fleet()
        for epoch in list(instance.held):
            instance.held.pop(epoch)
            if fleet is not None and not instance.cut_off:
                fleet.lease_manager.released(instance.incarnation, epoch)
        await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        if instance.alive:
            await self._gone(instance, "it ended in order")

    def connect(self, kind: str, address: str, incarnation: str) -> SimulatedInstanceClient:
        if incarnation not in self.instances:
            raise InstanceDown(incarnation, "there is no such process")
        # The word in the middle is a salt: another one would change what every known seed does.
        seed = f"{self.seed}/port/{incarnation}"
        client = SimulatedInstanceClient(
            self.instances[incarnation], random.Random(seed), self.faulty, self.heard
        )
        self.clients.append(client)
        return client
