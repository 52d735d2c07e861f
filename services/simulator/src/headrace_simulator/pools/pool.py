"""A pool of environments: spreads them over child processes and runs their operations. Knows no gRPC."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.memory.blobs import BlobStore

from headrace_simulator.backends import BACKENDS, WAITS
from headrace_simulator.config import SimulatorSettings
from headrace_simulator.pipes import Kind
from headrace_simulator.pools.brokers import Brokers
from headrace_simulator.pools.gathering import Authority, Gathering, Part
from headrace_simulator.pools.host import ChildHost, HostFault, HostLost, endpoint_of
from headrace_simulator.pools.ledger import Description, EnvironmentLedger, Operation, Outcome, length_of
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
        self._ledgers: list[EnvironmentLedger] = []
        self._gatherings: list[Gathering] = []
        """One for each child of a vectorized pool."""
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
        seed = self.plan.seed
        self._ledgers = [EnvironmentLedger(i, seed + i, shared) for i in range(self.plan.count)]
        if self.plan.vectorized:
            self._gatherings = [
                Gathering(
                    [ledger for ledger in self._ledgers if self._place(ledger.environment) == place],
                    partial(self._run_parts, place),
                    self._finish,
                    self._settings.gather_s,
                )
                for place in range(len(self._hosts))
            ]

    def perform(
        self, operations: Sequence[Operation], authority: Authority
    ) -> Iterator[asyncio.Future[list[Outcome]]]:
        """One future for each child concerned: it runs its operations, repeats their outcomes, or refuses them."""
        batches: defaultdict[int, list[Operation]] = defaultdict(list)
        for operation in operations:
            inside = 0 <= operation.environment < self.plan.count
            batches[self._place(operation.environment) if inside else -1].append(operation)
        if outside := batches.pop(-1, None):
            yield self._finish(self._refuse(outside))
        for index, batch in batches.items():
            if self._gatherings:
                yield self._finish(self._gatherings[index].outcomes(batch, authority))
            else:
                yield self._finish(self._in_turn(self._hosts[index], batch, authority))

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
        for gathering in self._gatherings:
            gathering.go_on()  # What waits is refused by now.
        if self._running:
            await asyncio.wait(self._running, timeout=notice_s)
        await asyncio.gather(*(host.kill() for host in self._hosts if host.turn.locked()))

    async def close(self) -> None:
        """Kills the children; operations that still run raise CancelledError."""
        for gathering in self._gatherings:
            gathering.close()
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

    async def _in_turn(
        self, host: ChildHost, operations: Sequence[Operation], authority: Authority
    ) -> list[Outcome]:
        async with host.turn:
            outcomes, admitted = self._admitted(operations, authority)
            return outcomes + await self._run(host, admitted) if admitted else outcomes

    async def _run_parts(self, place: int, parts: Sequence[Part]) -> None:
        """Runs the operations of several messages as one batch."""
        host = self._hosts[place]
        async with host.turn:
            found = [(part, *self._admitted(part.operations, part.authority)) for part in parts]
            admitted = [operation for _, _, mine in found for operation in mine]
            self._gatherings[place].abandon_but(admitted)
            ran = {each.environment: each for each in await self._run(host, admitted)} if admitted else {}
        for part, outcomes, mine in found:
            if not part.outcomes.done():  # who waited for it may be gone
                part.outcomes.set_result(outcomes + [ran[operation.environment] for operation in mine])

    def _admitted(
        self, operations: Sequence[Operation], authority: Authority
    ) -> tuple[list[Outcome], list[Operation]]:
        """Outcomes that are known without running the operations, and the operations that are to run."""
        outcomes, admitted = list[Outcome](), list[Operation]()
        for operation in operations:
            known = self._ledgers[operation.environment].admit(operation)
            if known is None:
                admitted.append(operation)
            else:
                outcomes.append(known)
        if admitted and (why_not := authority()) is not None:
            return outcomes + [_revoked(each, why_not) for each in admitted], []
        return outcomes, admitted

    async def _run(self, host: ChildHost, operations: Sequence[Operation]) -> list[Outcome]:
        """Runs admitted operations in one child; an episode that began in a past child is lost."""
        try:
            child = await host.ready()
        except (HostLost, HostFault) as lost:
            return [self._lost(each, str(lost), host) for each in operations]
        generation, outcomes, sent = host.generation, list[Outcome](), list[Operation]()
        for operation in operations:
            ledger = self._ledgers[operation.environment]
            # An episode stays in the process it began in; a reset takes whatever process there is.
            if operation.HasField("reset") or ledger.generation == generation:
                sent.append(ledger.effective(operation, generation))
            else:
                why = ledger.gone or "the process that held it ended"
                outcomes.append(self._lost(operation, why, host))
        if not sent:
            return outcomes
        # Of agents alone is this the rollout's word: an item of users may look like it.
        agents = self.description.conversation and self.description.agents
        for operation in sent if agents else ():
            if child.outlet and operation.HasField("reset"):
                child.outlet.endpoint = endpoint_of(operation.reset.options_json)
        child.send((Kind.OPERATE, simulator_pb2.StepRequest(operations=sent).SerializeToString()))
        given = {operation.environment: operation for operation in operations}
        waiting = deque(given[each.environment] for each in sent)
        while waiting:
            try:
                answer = await host.answer(child, self._limit_s(waiting))
            except HostLost as lost:
                outcomes += [self._lost(each, str(lost), host) for each in waiting]
                break
            for reply in simulator_pb2.StepResponse.FromString(answer).outcomes:
                outcomes.append(self._record(waiting.popleft(), reply, generation))
        return outcomes

    def _limit_s(self, waiting: Sequence[Operation]) -> float:
        """How long the next answer may take: the first operation's, or that of all which are stepped together."""
        next_ones = waiting if self.plan.vectorized else [waiting[0]]
        steps_s = self.plan.step_timeout_s * max(map(length_of, next_ones))
        resets = self.plan.auto_reset or any(each.HasField("reset") for each in next_ones)
        return steps_s + (self._reset_timeout_s if resets else 0.0)

    def _record(self, operation: Operation, outcome: Outcome, generation: int) -> Outcome:
        self._shelf.place(outcome)
        return self._ledgers[operation.environment].record(operation, outcome, generation)

    def _lost(self, operation: Operation, why: str, host: ChildHost) -> Outcome:
        ledger = self._ledgers[operation.environment]
        return self._record(operation, ledger.lost(operation, why), host.generation)


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


def _revoked(operation: Operation, why: str) -> Outcome:
    return Outcome(
        environment=operation.environment,
        step_index=operation.step_index,
        status=simulator_pb2.OUTCOME_STATUS_REVOKED,
        detail=why,
    )


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


class Shelf:
    """Keeps what a pool's children wrote of each environment's last outcome; `prefix` begins their files' names."""

    def __init__(self, blobs: BlobStore, prefix: str) -> None:
        self._blobs, self._prefix = blobs, prefix
        self._kept: dict[int, list[common_pb2.BlobRef]] = {}

    def place(self, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """Completes an outcome's references, and releases those of the environment's outcome before."""
        for reference in self._kept.pop(outcome.environment, []):
            self._blobs.release(reference)
        for tensors in (outcome.observation, outcome.final_observation):
            for tensor in tensors.values():
                if tensor.HasField("blob"):
                    reference = self._blobs.adopt(tensor.blob)
                    self._kept.setdefault(outcome.environment, []).append(reference)
                    tensor.blob.CopyFrom(reference)

    def clear(self) -> None:
        """Removes everything."""
        self._kept.clear()
        self._blobs.forget(self._prefix)
