"""A pool of environments: spreads them over child processes and runs their operations. Knows no gRPC."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2

from headrace_simulator.config import SimulatorSettings
from headrace_simulator.host import ChildHost, HostFault, HostLost
from headrace_simulator.ledger import EnvironmentLedger, Operation, Outcome
from headrace_simulator.pipes import Kind
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


@dataclass
class _Place:
    host: ChildHost
    ledger: EnvironmentLedger
    turn: asyncio.Lock


class EnvironmentPool:
    """An open pool. Operations on one environment run in turn, those on others side by side."""

    def __init__(self, name: str, plan: PoolPlan, settings: SimulatorSettings) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self.plan = plan
        self.description = simulator_pb2.OpenPoolResponse(pool=name, pool_incarnation=self.incarnation)
        self._settings = settings
        self._hosts = [
            ChildHost(opening, settings.open_timeout_s) for opening in _openings(plan, settings.children)
        ]
        self._places: list[_Place] = []
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
        self.description.MergeFromString(self._hosts[0].spaces)
        action_space = from_message(self.description.action_space)
        for index in range(self.plan.count):
            limit = self.plan.max_episode_steps
            ledger = EnvironmentLedger(index, self.plan.seed + index, action_space, limit)
            self._places.append(_Place(self._hosts[index % len(self._hosts)], ledger, asyncio.Lock()))

    async def perform(self, operation: Operation) -> Outcome:
        """Runs one operation, repeats its outcome, or refuses it."""
        if not 0 <= operation.environment < self.plan.count:
            return Outcome(
                environment=operation.environment,
                step_index=operation.step_index,
                status=simulator_pb2.OUTCOME_STATUS_REFUSED,
                detail=f"environment {operation.environment} of a pool of {self.plan.count}",
            )
        return await self._finish(self._in_turn(self._places[operation.environment], operation))

    async def render(self, environment: int) -> common_pb2.Tensor:
        """A picture, (height, width, 3) uint8.

        Raises:
            HostFault: the environment makes none, or needs a reset first.
            HostLost: its process died or took too long.
        """
        return await self._finish(self._render(self._places[environment], environment))

    async def close(self) -> None:
        """Kills the children; operations that still run raise CancelledError."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in self._hosts))

    @property
    def _reset_timeout_s(self) -> float:
        return max(self.plan.step_timeout_s, self._settings.reset_timeout_s)

    async def _finish(self, work: Coroutine[None, None, _RESULT]) -> _RESULT:
        """What has begun is finished even when its caller goes away: no answer is left in a pipe."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _render(self, place: _Place, environment: int) -> common_pb2.Tensor:
        payload = json.dumps({"environment": environment}).encode()
        async with place.turn:
            frame, _ = await place.host.ask(Kind.RENDER, lambda _: payload, self._reset_timeout_s)
        return common_pb2.Tensor.FromString(frame)

    async def _in_turn(self, place: _Place, operation: Operation) -> Outcome:
        async with place.turn:
            known = place.ledger.admit(operation)
            return known if known is not None else await self._run(place, operation)

    async def _run(self, place: _Place, operation: Operation) -> Outcome:
        ledger, host = place.ledger, place.host
        is_reset = operation.HasField("reset")
        limit = self._reset_timeout_s if is_reset else self.plan.step_timeout_s
        # An episode stays in the process it began in; a reset takes whatever process there is.
        expected = None if is_reset else ledger.generation

        def payload_for(generation: int) -> bytes:
            return ledger.effective(operation, generation).SerializeToString()

        try:
            reply, generation = await host.ask(Kind.OPERATE, payload_for, limit, expected)
        except (HostLost, HostFault) as lost:
            return ledger.record(operation, ledger.lost(operation, str(lost)), host.generation)
        return ledger.record(operation, Outcome.FromString(reply), generation)


def _openings(plan: PoolPlan, children: int) -> list[dict[str, Any]]:
    """What each child holds: environment i is in child i modulo their number."""
    number = min(plan.count, children)
    return [
        {
            "backend": plan.backend,
            "name": plan.environment,
            "options": plan.options,
            "own_time_limit": plan.max_episode_steps == 0,
            "environments": list(range(first, plan.count, number)),
        }
        for first in range(number)
    ]
