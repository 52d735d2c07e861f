"""The environments of a run of episodes: pools at simulators, one for each (simulator, rollout, task).

Decides where pools are; the rollouts act in them. The pools of a simulator that is lost are opened elsewhere; a new
simulator is used once no rollout is at work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.sections.scoring import short_names
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import CONVERSATIONS
from headrace_servicekit.causes import cause_first

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.fitting import simulators as simulators_with
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.deaths import Use
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_coordinator.run.workers.clients import SimulatorClient
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.opening import client_of, wait_for_instances
from headrace_coordinator.run.workers.rollout_client import RolloutClient

REWARDS = {
    "default": simulator.REWARD_MODE_UNSPECIFIED,
    "dense": simulator.REWARD_MODE_DENSE,
    "sparse": simulator.REWARD_MODE_SPARSE,
}
BLOB_BYTES = 96 * 1024
"""Pictures of at least this size go through shared memory where simulator and rollout share a host; smaller ones are
faster in the message (`benchmarks/pictures.py`)."""
Place = tuple[str, str, str]
"""Incarnation of a simulator, incarnation of a rollout, task."""
KEYS = {
    "environment.name": "environment.tasks",
    "options_json": "environment.options",
    "reward_mode": "environment.reward",
    "step_timeout": "environment.step_timeout_s",
}
"""Fields of OpenPool by the spec's keys."""
OF_AGENTS = {"environment.name": "agent.task", "options_json": "agent.options"}
"""Those of agents that a plug-in's backend starts."""


class Pools:
    """The simulators at work for a run, and what each has open for which rollout."""

    def __init__(self, workers: WorkerGroup, leases: WorkerLeases) -> None:
        assert workers.spec.environment is not None
        self.described: dict[str, simulator.OpenPoolResponse] = {}
        """By task, the newest description."""
        self._workers = workers
        self._fleet = workers.fleet
        self._run = workers.run
        self._environment = workers.spec.environment
        self._leases = leases
        self._open: dict[Place, rollout.EnvironmentPool] = {}
        self._moving = asyncio.Lock()
        self._acting: dict[str, list[Use]] = {}
        """Environments at work, by the incarnation of the rollout that acts in them."""

    def ready(self) -> list[InstanceState]:
        """Simulators that may be used."""
        return simulators_with(self._fleet.ready("simulator"), self._environment.backend)

    def of(self, incarnation: str) -> list[rollout.EnvironmentPool]:
        """The pools of a rollout, with the authority to step them."""
        found = []
        for (where, who, _), pool in sorted(self._open.items()):
            if who == incarnation:
                pool.header.CopyFrom(self._client(where).header())
                found.append(pool)
        return found

    def count(self, incarnation: str) -> int:
        """How many environments a rollout has."""
        return sum(pool.count for (_, who, _), pool in self._open.items() if who == incarnation)

    def instruction(self, task: str) -> str:
        """What a task asks for, in words: as the spec says, or the environment; "" where neither does."""
        described = self.described.get(task)
        said = described.instruction if described is not None else ""
        return self._environment.instruction_of(task) or said

    @property
    def versions(self) -> dict[str, str]:
        """Of what the environments are made of, by name."""
        return {name: version for each in self.described.values() for name, version in each.versions.items()}

    def count_environments(self) -> None:
        """Rollouts act in all environments that they have."""
        for worker in self._workers.rollouts:
            worker.max_concurrency = max(1, self.count(worker.incarnation))

    async def prepare(self, worker: RolloutClient) -> None:
        """Before a stream of episodes: the rollout has environments, at simulators that hold their devices."""
        while True:
            await self.staff(worker)
            async with self._leases.lock:
                if await self._leases.simulators.acquire():
                    break
        self.acted(worker)
        where = {place[0] for place in self._open if place[1] == worker.incarnation}
        clients = [client for client in self._workers.simulators if client.incarnation in where]
        for client in clients:
            await self._fleet.deaths.turn(self._run, client.instance)
        uses = [self._fleet.deaths.begin(self._run, client.instance) for client in clients]
        self._acting[worker.incarnation] = uses

    def acted(self, worker: RolloutClient, *, well: bool = False) -> None:
        """A rollout's stream of episodes has ended; `well`: with all that it was asked for."""
        deaths = self._fleet.deaths
        for use in self._acting.pop(worker.incarnation, []):
            (deaths.end if well else deaths.broke)(use)
            if well:
                deaths.clear(self._run)

    async def staff(self, only: RolloutClient | None = None) -> None:
        """Every granted rollout has environments; while rollouts act, those of `only` one may move.

        The first time, and where what the environments are made of has another version, also says by an event what the
        policy reads and does. Raises Unstaffed where no simulator comes, InstanceDown when none answers, and
        CallRefused for what one refuses to open.
        """
        workers = self._workers
        self._check_deaths()
        await wait_for_instances(workers, lambda: bool(self.ready()), self._lack)
        rollouts = [state.incarnation for state in workers.alive(workers.grant.rollouts)]
        async with self._moving:
            await self._staff(rollouts, rollouts if only is None else [only.incarnation])
        self.count_environments()
        fitted = workers.state.fitted
        robots = self.described and workers.spec.workflow != CONVERSATIONS
        if robots and (fitted is None or fitted.versions != self.versions):
            await self._fit()

    async def _fit(self) -> None:
        model = self._workers.spec.model
        try:
            file = None if model.policy is not None else read_policy_file(model.path)
            found = fit(model.policy, self._environment, self.described, file)
        except Impossible as impossible:
            raise CallRefused("simulator", "INVALID", str(impossible)) from impossible
        await self._fleet.event_log.commit(
            ev.PolicyFitted(
                run=self._run,
                policy=found.policy,
                state=found.state,
                cameras=found.cameras,
                versions=self.versions,
            )
        )

    async def _staff(self, rollouts: list[str], movable: Collection[str]) -> None:
        failed: set[str] = set()
        while True:
            self._meet(failed, keep=not {*rollouts} <= {*movable})
            if not self._workers.simulators:
                await self._replaced(failed)
                continue
            where = [client.incarnation for client in self._workers.simulators]
            wanted = divide(self._environment.count, rollouts, self._environment.tasks, where)
            await self._close(self._unwanted(wanted, rollouts, movable))
            missing = {
                place: count
                for place, count in wanted.items()
                if place not in self._open and (place[1] in movable or not self.count(place[1]))
            }
            lost = await gather_all(*(self._open_pool(place, count) for place, count in missing.items()))
            if not any(lost):
                return
            failed |= {incarnation for incarnation in lost if incarnation}

    @property
    def _lack(self) -> str:
        return f"1 ready simulator with {self._environment.backend}"

    async def _replaced(self, failed: Collection[str]) -> None:
        """Waits for a simulator in place of those that died as they made the run's environments."""
        self._check_deaths()
        if any(self._fleet.alive(incarnation) for incarnation in failed):
            raise InstanceDown("simulator", "no simulator opens the run's environments")

        def replaced() -> bool:
            return any(state.incarnation not in failed for state in self.ready())

        await wait_for_instances(self._workers, replaced, self._lack)

    def _check_deaths(self) -> None:
        """Raises CallRefused where simulators die of the run's environments, whose names it says."""
        if why := self._fleet.deaths.fatal(self._run, "simulator"):
            names = ", ".join(short_names(self._environment.tasks).values())
            why = cause_first(why, f"its environments are {names}", "environment.tasks")
            raise CallRefused("simulator", "INVALID", why)

    async def lost(self, incarnation: str, names: Iterable[str]) -> None:
        """A rollout's pools that answer no more: they are opened anew when it is staffed next."""
        names = set(names)
        places = [p for p, pool in self._open.items() if p[1] == incarnation and pool.pool in names]
        for where in {place[0] for place in places}:
            await self._fleet.fate(where)
        async with self._moving:
            await self._close(place for place in places if place in self._open)

    def _meet(self, failed: Collection[str], *, keep: bool) -> None:
        """Clients of the simulators that are ready now; with `keep`, those that hold devices keep them."""
        ready = {state.incarnation: state for state in self.ready() if state.incarnation not in failed}
        devices = self._leases.simulators.seats(list(ready.values()), keep=keep)
        ready = {incarnation: ready[incarnation] for incarnation in devices}
        simulators = [c for c in self._workers.simulators if c.opened and c.incarnation in ready]
        known = {client.incarnation for client in simulators}
        for place in [place for place in self._open if place[0] not in known]:
            del self._open[place]
        for state in ready.values():
            if state.incarnation not in known:
                client = client_of(self._workers, SimulatorClient, state)
                # A fresh id closes what a coordinator that stopped had open there.
                client.open_id, client.opened = self._fleet.next_open_id(), True
                simulators.append(client)
        for client in simulators:
            client.devices = devices[client.incarnation]
        self._workers.simulators = simulators

    def _unwanted(
        self, wanted: Mapping[Place, int], rollouts: Collection[str], movable: Collection[str]
    ) -> list[Place]:
        return [
            place
            for place, pool in self._open.items()
            if place[1] not in rollouts or (place[1] in movable and wanted.get(place) != pool.count)
        ]

    async def _close(self, places: Iterable[Place]) -> None:
        for place in list(places):
            pool = self._open.pop(place)
            client = next((c for c in self._workers.simulators if c.incarnation == place[0]), None)
            if client is None or not self._fleet.alive(place[0]):
                continue
            try:
                await client.close_pool(pool.pool)
            except (InstanceDown, CallRefused):
                client.opened = False  # The next opening there has a higher id, which closes what is left.

    async def _open_pool(self, place: Place, count: int) -> str:
        """Opens a pool; the simulator's incarnation where that gives no answer."""
        where, _, task = place
        client = self._client(where)
        request = opening(self._workers.spec, task, count)
        request.blob_bytes = BLOB_BYTES if self._one_host(place) else 0
        request.leased = bool(client.devices)
        name = client.instance.instance
        try:
            async with self._fleet.deaths.opening(self._run, client.instance):
                with self._fleet.waits.named(self._run, f"{name} to make {count} environments of {task}"):
                    response = await client.open_pool(request)
        except InstanceDown:
            await self._fleet.fate(where)
            client.opened = False
            return where
        except CallRefused as refused:
            raise refusal_in_users_keys(self._workers.spec, refused) from refused
        if problems := other_kind(self._workers.spec, response):
            raise CallRefused("simulator", "INVALID", str(Impossible(problems)), problems[0].key)
        self.described[task] = response
        self._open[place] = rollout.EnvironmentPool(
            address=client.instance.address,
            pool=response.pool,
            pool_incarnation=response.pool_incarnation,
            count=count,
            task=task,
        )
        return ""

    def _one_host(self, place: Place) -> bool:
        """Whether a place's rollout reads the simulator's shared memory."""
        instances = self._fleet.event_log.state.instances
        hosts = {instances[each].host if each in instances else "" for each in place[:2]}
        return len(hosts) == 1 and "" not in hosts

    def _client(self, incarnation: str) -> SimulatorClient:
        return next(client for client in self._workers.simulators if client.incarnation == incarnation)


def divide(
    count: int, rollouts: Sequence[str], tasks: Sequence[str], simulators: Sequence[str]
) -> dict[Place, int]:
    """Environments of each pool: evenly over rollouts, tasks and simulators; each rollout has one of each task."""
    pools: dict[Place, int] = {}
    turn = 0
    for who, share in zip(rollouts, _shares(count, len(rollouts)), strict=True):
        for task, part in zip(tasks, _shares(max(share, len(tasks)), len(tasks)), strict=True):
            for _ in range(part):
                place = (simulators[turn % len(simulators)], who, task)
                pools[place] = pools.get(place, 0) + 1
                turn += 1
    return pools


def _shares(count: int, parts: int) -> list[int]:
    share, extra = divmod(count, parts) if parts else (0, 0)
    return [share + (index < extra) for index in range(parts)]


def opening(spec: RunSpec, task: str, count: int) -> simulator.OpenPoolRequest:
    """What asks for environments of a task, without authority."""
    section = spec.environment
    assert section is not None
    request = simulator.OpenPoolRequest(
        environment=simulator.Environment(backend=section.backend, name=section.variant_of(task)[0]),
        count=count,
        options_json=json.dumps(section.options_of(task)),
        max_episode_steps=section.max_episode_steps,
        reward_mode=REWARDS[section.reward],
        processes=section.processes and min(section.processes, count),
        without_info=True,
        vectorized=section.vectorized,
        variables=section.env,
    )
    request.step_timeout.FromMilliseconds(int(section.step_timeout_s * 1000))
    return request


def other_kind(spec: RunSpec, described: simulator.OpenPoolResponse) -> list[KeyProblemView]:
    """The problems of a run of conversations whose environments are robots', or the other way round, or which have
    other roles than the run says.
    """
    assert spec.environment is not None
    backend, key = spec.environment.backend, "environment.backend"
    if described.conversation == (spec.workflow == CONVERSATIONS):
        if described.conversation and described.agents != (spec.agent is not None):
            return [_who_leads(spec, backend, described)]
        return _other_roles(spec.environment, list(described.roles))
    if described.conversation:
        reason = f"{backend} has conversations, and the run's policy is a robot's"
        return [problem(key, reason, f"set workflow: {CONVERSATIONS}, or name a simulator of robots")]
    reason = f"{backend} has environments of robots, and the run's policy speaks"
    return [problem(key, reason, "leave it out, or set workflow: embodied")]


def _who_leads(spec: RunSpec, backend: str, described: simulator.OpenPoolResponse) -> KeyProblemView:
    assert spec.environment is not None
    if described.agents:
        fix = f"write agent: {{backend: {backend}, task: {spec.environment.tasks[0]}}}"
        return problem("environment.backend", f"{backend} starts agents, which lead the conversation", fix)
    fix = f"write environment: {{backend: {backend}, tasks: [{spec.environment.tasks[0]}]}}"
    return problem("agent.backend", f"{backend} has environments, and starts no agents", fix)


def _other_roles(section: EnvironmentSection, roles: Sequence[str]) -> list[KeyProblemView]:
    named = ", ".join(roles) or "none"
    strange = [
        problem(f"environment.roles.{each}", f"the environment has no such role; roles: {named}", "remove it")
        for each in section.roles
        if each not in roles
    ]
    others = {name for name, role in section.roles.items() if role.policy or not role.trained}
    if roles and not strange and others >= {*roles}:
        reason = f"none of {named} is played by the run's own policy and learned from"
        return [problem("environment.roles", reason, "leave one out, or remove its policy or learns: false")]
    if roles and section.on_overflow != "end":
        reason = f"the environment has roles ({named}), and a role has one branch"
        return [*strange, problem("environment.on_overflow", reason, "remove it")]
    return strange


def refusal_in_users_keys(spec: RunSpec, refused: CallRefused) -> CallRefused:
    """The same refusal, with the spec's keys in place of OpenPool's fields."""
    message, key = refused.message, refused.key
    plugged = spec.agent is not None and spec.agent.backend
    for field, users in (KEYS | OF_AGENTS if plugged else KEYS).items():
        for end in (":", "."):  # as a whole, or a part of it
            message = message.replace(f"{field}{end}", f"{users}{end}")
        if key == field or key.startswith(f"{field}."):
            key = users + key.removeprefix(field)
    return CallRefused(refused.incarnation, refused.reason, message, key)
