"""A pool of environments: spreads them over child processes and runs their operations. Knows no gRPC."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.memory.blobs import BlobStore

from headrace_simulator.backends import BACKENDS, WAITS
from headrace_simulator.batches import ChunkBatch, operations_of
from headrace_simulator.config import SimulatorSettings
from headrace_simulator.pipes import Kind
from headrace_simulator.pools.brokers import Brokers
from headrace_simulator.pools.gathering import Authority, Outcomes
from headrace_simulator.pools.host import ChildHost
from headrace_simulator.pools.ledger import Description, EnvironmentLedger, Operation, Outcome
from headrace_simulator.pools.running import Child, ChildRules, Shelf
from headrace_simulator.spaces import from_message

_RESULT = TypeVar("_RESULT")


@dataclass(frozen=True)
class PoolPlan:
    """What a pool is to hold."""

    backend: str
    environment: str
    count: int
    options: dict[str, Any]
    seed: int
    max_episode_steps: int
    """0 leaves the end of an episode to the environment."""
    step_timeout_s: float
    dense: bool = False
    sparse: bool = False
    auto_reset: bool = False
    processes: int = 0
    """0 leaves it to the settings."""
    blob_bytes: int = 0
    without_info: bool = False
    """Whether outcomes of actions have no figures beside the reward."""
    leased: bool = False
    """Whether its operations need a lease."""
    vectorized: bool = False
    """Whether the environments of a process are stepped in one call."""
    variables: tuple[str, ...] = ()
    """Of this service's environment, what the environments get."""


class EnvironmentPool:
    """An open pool. A child runs one batch of operations at a time, the children run side by side."""

    def __init__(
        self,
        name: str,
        plan: PoolPlan,
        settings: SimulatorSettings,
        blobs: BlobStore,
        brokers: Brokers | None = None,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.plan = plan
        self.description = simulator_pb2.OpenPoolResponse(pool=name, pool_incarnation=self.incarnation)
        self._settings = settings
        self._shelf = Shelf(blobs, self.incarnation)
        shelf = [str(blobs.folder), self.incarnation, plan.blob_bytes] if plan.blob_bytes else None
        self._hosts = [
            ChildHost({**opening, "shelf": shelf}, settings.open_timeout_s, brokers)
            for opening in _openings(plan, settings.children)
        ]
        self._children: list[Child] = []
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Makes all environments, or none.

        Raises:
            HostFault: the backend refuses the name or an option.
            HostLost: a process died or took too long.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for host in self._hosts:
                    group.create_task(host.open())
        except (
            BaseExceptionGroup
        ) as failures:  # the task group wraps everything; callers know the first error
            await self.close()
            raise failures.exceptions[0] from None
        except asyncio.CancelledError:
            await self.close()
            raise
        found = self.description
        found.MergeFromString(self._hosts[0].description)
        action_space = None if found.conversation else from_message(found.action_space)
        shared = Description(action_space, found.init_state_count, self.plan.auto_reset)
        rules = ChildRules(
            self.plan.step_timeout_s,
            self._reset_timeout_s,
            self._settings.gather_s,
            vectorized=self.plan.vectorized,
            agents=found.conversation and found.agents,
        )
        held: list[list[EnvironmentLedger]] = [[] for _ in self._hosts]
        for i in range(self.plan.count):
            held[self._place(i)].append(EnvironmentLedger(i, self.plan.seed + i, shared))
        self._children = [
            Child(host, ledgers, shared, rules, self._shelf, self._finish)
            for host, ledgers in zip(self._hosts, held, strict=True)
        ]

    def perform(
        self, request: simulator_pb2.StepRequest, authority: Authority
    ) -> Iterator[asyncio.Future[Outcomes]]:
        """One future for each child concerned: it runs its operations, repeats their outcomes, or refuses them."""
        whole = self._place_of_batch(request.batch)
        together: dict[int, ChunkBatch] = {} if whole < 0 else {whole: request.batch}
        apart = operations_of(request.batch) if request.batch.environments and whole < 0 else []
        operations: defaultdict[int, list[Operation]] = defaultdict(list)
        for operation in [*request.operations, *apart]:
            inside = 0 <= operation.environment < self.plan.count
            operations[self._place(operation.environment) if inside else -1].append(operation)
        if outside := operations.pop(-1, None):
            yield self._finish(self._refuse(outside))
        for place in {**operations, **together}:
            child = self._children[place]
            yield self._finish(child.outcomes(operations[place], together.get(place), authority))

    def _place_of_batch(self, batch: ChunkBatch) -> int:
        """Which child steps all environments of a batch in one call; -1 for none."""
        if not self.plan.vectorized or not batch.environments:
            return -1
        if min(batch.environments) < 0 or max(batch.environments) >= self.plan.count:
            return -1
        first, *others = {self._place(each) for each in batch.environments}
        return -1 if others else first

    async def render(self, environment: int) -> common_pb2.Tensor:
        """A picture, (height, width, 3) uint8.

        Raises:
            HostFault: the environment makes none, or needs a reset first.
            HostLost: its process died or took too long.
        """
        return common_pb2.Tensor.FromString(await self._asked(Kind.RENDER, environment))

    async def video(self, environment: int) -> bytes:
        """The MP4 file of the episode that is recorded; raises as `render`."""
        return await self._asked(Kind.VIDEO, environment)

    def use(self, devices: Sequence[str], memory_part: float = 1.0) -> None:
        """The devices of the lease that the next operations run under, and its part of their memory."""
        for host in self._hosts:
            host.devices, host.share = tuple(devices), len(self._hosts)
            host.memory_part = memory_part

    async def end_processes(self) -> None:
        """Ends the children, for a GPU that is released; they are made again by the next reset."""
        await asyncio.gather(*(host.end_process() for host in self._hosts))

    async def settle(self, notice_s: float) -> None:
        """Returns once nothing runs; kills the children of operations that take longer than `notice_s`."""
        for child in self._children:
            child.go_on()  # What waits is refused by now.
        if self._running:
            await asyncio.wait(self._running, timeout=notice_s)
        await asyncio.gather(*(host.kill() for host in self._hosts if host.turn.locked()))

    async def close(self) -> None:
        """Kills the children; operations that still run raise CancelledError."""
        for child in self._children:
            child.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in self._hosts))
        self._shelf.clear()

    @property
    def _reset_timeout_s(self) -> float:
        return max(self.plan.step_timeout_s, self._settings.reset_timeout_s)

    def _place(self, environment: int) -> int:
        """Which child has an environment."""
        return place_of(environment, self.plan, len(self._hosts))

    def _finish(self, work: Coroutine[None, None, _RESULT]) -> asyncio.Future[_RESULT]:
        """Finishes what has begun even when its caller goes away: no answer is left in a pipe."""
        result: asyncio.Future[_RESULT] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_into(result, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return result

    async def _refuse(self, operations: Sequence[Operation]) -> list[Outcome]:
        refused = simulator_pb2.OUTCOME_STATUS_REFUSED
        return [
            Outcome(
                environment=each.environment,
                step_index=each.step_index,
                status=refused,
                detail=f"environment {each.environment} of a pool of {self.plan.count}",
            )
            for each in operations
        ]

    async def _asked(self, kind: Kind, environment: int) -> bytes:
        host = self._hosts[self._place(environment)]

        async def ask() -> bytes:
            async with host.turn:
                child = await host.ready()
                child.send((kind, json.dumps({"environment": environment}).encode()))
                return await host.answer(child, self._reset_timeout_s)

        return await self._finish(ask())


async def _into(result: asyncio.Future[_RESULT], work: Coroutine[None, None, _RESULT]) -> None:
    """Does the work. Its caller learns the result at once, without a turn of the loop between, and may be gone."""
    try:
        found = await work
    except BaseException as error:  # whatever it is, the caller gets it
        if isinstance(error, asyncio.CancelledError):
            result.cancel()
            raise
        if not result.done():
            result.set_exception(error)
    else:
        if not result.done():
            result.set_result(found)


def place_of(environment: int, plan: PoolPlan, children: int) -> int:
    """Which child has an environment: they take turns; those that are stepped together lie side by side.

    A rollout acts for blocks of environments in turn: a block is then in one child, and is stepped in one call.
    """
    return environment * children // plan.count if plan.vectorized else environment % children


def _processes(plan: PoolPlan, children: int) -> int:
    """How many children a pool has where nobody says."""
    if plan.vectorized:
        return 1
    waits = f"{plan.backend}:{WAITS}" in BACKENDS.features([plan.backend])
    return plan.count if waits else children


def _openings(plan: PoolPlan, children: int) -> list[dict[str, Any]]:
    """What each child holds."""
    number = min(plan.count, plan.processes or _processes(plan, children))
    held: list[list[int]] = [[] for _ in range(number)]
    for environment in range(plan.count):
        held[place_of(environment, plan, number)].append(environment)
    return [
        {
            "backend": plan.backend,
            "name": plan.environment,
            "options": plan.options,
            "max_episode_steps": plan.max_episode_steps,
            "dense": plan.dense,
            "sparse": plan.sparse,
            "auto_reset": plan.auto_reset,
            "without_info": plan.without_info,
            "vectorized": plan.vectorized,
            "environments": environments,
            "env": plan.variables,
        }
        for environments in held
    ]
