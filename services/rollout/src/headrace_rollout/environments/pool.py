"""A pool of environments at a simulator, behind one Step stream. Knows no policy and no episode.

Steps are counted here for as long as the pool lives, over all streams of the run that use it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.process.local import LocalCall, nearest
from headrace_servicekit.rpc.client import deadlines_enabled, dial
from headrace_servicekit.rpc.episodes import Bodies
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor

from headrace_rollout.engines.figures import BusyTime
from headrace_rollout.wire import invalid

MAX_OBSERVATION_BYTES = 1 << 28
RESET_S = 300.0
"""Longest a reset may take. The simulator's own limits are shorter: this one is for a simulator that hangs."""

Operation = simulator_pb2.EnvironmentOperation
Outcome = simulator_pb2.EnvironmentOutcome


class PoolLost(Exception):
    """The pool answers no more."""


class EnvironmentLost(Exception):
    """One environment's process died or hung; it is made anew at the next reset."""


class Decision(Protocol):
    """What a policy decided: `executed_CA` in the environment's units."""

    @property
    def executed_CA(self) -> np.ndarray: ...


class Environment:
    """One environment of a pool; one episode at a time, which holds `turn`."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.turn = asyncio.Lock()
        self.bodies: dict[str, bytearray] = {}
        """What the last outcome refers to, by digest."""
        self.due = math.inf
        """When the operation under way has to be answered, by the loop's clock."""
        self._pool, self._index = pool, index
        self._next_step = 0
        self._waiting: asyncio.Future[Outcome] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._ends_next = False

    async def reset(
        self, start: rollout_pb2.EpisodeStart, options_json: str = "", *, until_success: bool = False
    ) -> Outcome:
        """Begins an episode, as `restart`. Raises as `settled`."""
        await self.free()
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.restart(start, answered, options_json, until_success=until_success)
        return await self.settled(await answered)

    async def free(self) -> None:
        """Returns once nothing is under way: an operation of an episode that was stopped may be."""
        while not self._idle.is_set():
            await self._idle.wait()

    def restart(
        self,
        start: rollout_pb2.EpisodeStart,
        answered: asyncio.Future[Outcome],
        options_json: str = "",
        *,
        until_success: bool = False,
    ) -> None:
        """Begins an episode, with `options_json` in place of the start's own if given; else as `begin`."""
        reset = simulator_pb2.ResetOperation(
            seed=start.seed,
            record=start.record,
            options_json=options_json or start.options_json,
            until_success=until_success,
        )
        if start.HasField("init_state"):
            reset.init_state = start.init_state
        self._operate(Operation(reset=reset), 0, answered)

    def begin(self, decision: Decision, answered: asyncio.Future[Outcome]) -> None:
        """Executes a chunk, until the episode ends; `answered` gets the outcome or PoolLost. Raises PoolLost."""
        actions_CA = decision.executed_CA
        operation = Operation()
        write_tensor(operation.action_chunk, actions_CA)
        self._operate(operation, len(actions_CA), answered)

    async def say(self, content: str) -> Outcome:
        """Takes a turn of a conversation. Raises as `settled`."""
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._operate(Operation(turn=simulator_pb2.AssistantTurn(content=content)), 1, answered)
        return await self.settled(await answered)

    async def wait(self, seconds: float) -> Outcome:
        """Waits so long for the end of an agent; the outcome is `terminated` once it has ended. Raises as `settled`."""
        waits = simulator_pb2.AwaitAgent()
        waits.wait.FromNanoseconds(int(seconds * 1e9))
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._operate(Operation(await_agent=waits), 1, answered)
        return await self.settled(await answered)

    def end_agent(self) -> None:
        """Kills an agent that still runs, at once or when the operation under way is answered; waits for nothing."""
        if not self._idle.is_set():
            self._ends_next = True
        elif not self._pool.reason:
            answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            answered.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._operate(Operation(await_agent=simulator_pb2.AwaitAgent(kill=True)), 1, answered)

    async def settled(self, outcome: Outcome) -> Outcome:
        """The outcome; what it refers to is in `bodies`.

        Raises EnvironmentLost, PoolLost, and ServiceError REFUSED_BY_SIMULATOR with its reason.
        """
        if outcome.status != simulator_pb2.OUTCOME_STATUS_OK:
            self._check(outcome)
        self.bodies = await self._pool.fetch_blobs(outcome)
        return outcome

    async def video(self) -> bytes:
        """The MP4 file of the episode, whose start asked for it. Raises PoolLost, and ServiceError INVALID for none."""
        return await self._pool.video(self._index)

    def _operate(self, operation: Operation, actions: int, answered: asyncio.Future[Outcome]) -> None:
        pool = self._pool
        operation.environment, operation.step_index = self._index, self._next_step
        pool.send(operation)
        # The answer is set on the future directly, and one timer watches all environments: this is done in each step.
        self._waiting = answered
        self._idle.clear()
        pool.asked.begin()
        # Environments of one process take turns, and each may use up its own limit.
        limit_s = RESET_S + pool.step_timeout_s * max(actions, 1) * len(pool.environments)
        self.due = asyncio.get_running_loop().time() + limit_s
        pool.watch(self.due)

    @property
    def step_timeout_s(self) -> float:
        """How long one operation may take."""
        return self._pool.step_timeout_s

    @property
    def name(self) -> str:
        """For messages."""
        return f"environment {self._index} of {self._pool.task} ({self._pool.name} at {self._pool.address})"

    def _check(self, outcome: Outcome) -> None:
        if outcome.status == simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST:
            raise EnvironmentLost(f"{self.name}: {outcome.detail}")
        if outcome.status == simulator_pb2.OUTCOME_STATUS_REVOKED:
            self._pool.lose(f"{self._pool.name} at {self._pool.address}: {outcome.detail}")
            raise PoolLost(self._pool.reason)
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "REFUSED_BY_SIMULATOR",
            f"{self.name} refuses: {outcome.detail}; the policy's bounds and the start states must be the "
            "environment's",
        )

    def answered(self, outcome: Outcome) -> None:
        """Takes the outcome of what was sent."""
        if outcome.status in (
            simulator_pb2.OUTCOME_STATUS_OK,
            simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST,
        ):
            self._next_step = outcome.step_index + 1
        waiting = self._ended()
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)
        ends, self._ends_next = self._ends_next, False
        if ends and outcome.status == simulator_pb2.OUTCOME_STATUS_OK and not outcome.terminated:
            self.end_agent()

    def lose(self, reason: str) -> None:
        """Raises PoolLost where an outcome is awaited."""
        waiting = self._ended()
        if waiting is not None and not waiting.done():
            waiting.set_exception(PoolLost(reason))

    def _ended(self) -> asyncio.Future[Outcome] | None:
        """Ends the operation under way; returns the future that waits for it, which may be cancelled."""
        if self._idle.is_set():
            return None
        waiting, self._waiting, self.due = self._waiting, None, math.inf
        self._pool.asked.end()
        self._idle.set()
        return waiting


class Pool:
    """The environments of one pool. `reason` says why it was lost; empty while it is not."""

    def __init__(
        self,
        message: rollout_pb2.EnvironmentPool,
        token: str | None,
        blobs: BlobReader,
        step_timeout_s: float,
        asked: BusyTime | None = None,
        operations: Counter[str] | None = None,
    ) -> None:
        self.name, self.address, self.task = message.pool, message.address, message.task
        self.step_timeout_s = step_timeout_s
        self.asked = asked or BusyTime()
        self._sent: Counter[str] = Counter() if operations is None else operations
        self.reason = ""
        self.lost = asyncio.Event()
        self.environments = [Environment(self, index) for index in range(message.count)]
        self._message, self._blobs = message, blobs
        self._header, self._told = message.header, False
        self._operations: asyncio.Queue[Operation] = asyncio.Queue()
        self._watch: asyncio.TimerHandle | None = None
        self._channel = dial(message.address, token=token)
        self._stub: Any = simulator_pb2_grpc.SimulatorServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._reader = asyncio.create_task(self._read(), name=f"read outcomes of {self.name}")

    def under(self, header: common_pb2.CommandHeader) -> None:
        """Sets the authority of operations from now on: a Step stream is used under one lease after another."""
        if header.lease_epoch != self._header.lease_epoch:
            self._header, self._told = header, False

    def send(self, operation: Operation) -> None:
        """Puts an operation on the stream; raises PoolLost."""
        if self.reason:
            raise PoolLost(self.reason)
        self._operations.put_nowait(operation)

    def watch(self, due: float) -> None:
        """Loses the pool where one of its environments is still not idle at its `due` moment."""
        if not deadlines_enabled() or (self._watch is not None and self._watch.when() <= due):
            return
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._watch = None
        first = min(self.environments, key=lambda each: each.due)
        if first.due <= asyncio.get_running_loop().time():
            self.lose(
                f"{first.name} has not answered in time, {RESET_S:.0f} s and the time limits of its actions"
            )
        elif first.due < math.inf:
            self.watch(first.due)

    def lose(self, reason: str) -> None:
        """Sends nothing any more and raises PoolLost where an outcome is awaited."""
        if not self.reason:
            self.reason = reason
            if self._watch is not None:
                self._watch.cancel()
            self._reader.cancel()
            for environment in self.environments:
                environment.lose(reason)
            self.lost.set()

    async def close(self) -> None:
        """Ends the stream; the pool stays open at its simulator."""
        self.lose("its run was closed here")
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    async def fetch_blobs(self, outcome: Outcome) -> dict[str, bytearray]:
        """The bodies of an outcome's references, by digest: they are gone after the next operation."""
        wanted = [
            tensor.blob
            for tensors in (outcome.observation, outcome.final_observation)
            for tensor in tensors.values()
            if tensor.WhichOneof("body") == "blob"
        ]
        return {reference.digest: await self._blobs.read(reference) for reference in wanted}

    async def video(self, environment: int) -> bytes:
        """The MP4 file of an environment's episode. Raises as `Environment.video`."""
        request = simulator_pb2.RenderRequest(pool=self.name, environments=[environment], video=True)
        try:
            response = await self._stub.Render(request, timeout=RESET_S if deadlines_enabled() else None)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                message = f"{self.address}: {message_of(error)}; or ask for no videos"
                raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message) from error
            self.lose(f"{self.name} at {self.address}: {message_of(error)}")
            raise PoolLost(self.reason) from error
        video: bytes = response.videos[0]
        return video

    async def _read(self) -> None:
        offer = self._stub.StepLocally(simulator_pb2.StepLocallyRequest(pool=self.name))
        try:
            call = await nearest(offer, self._stub.Step, simulator_pb2.StepResponse.FromString)
            writing = asyncio.create_task(self._write(call), name=f"write operations of {self.name}")
            try:
                while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    for outcome in response.outcomes:
                        self.environments[outcome.environment].answered(outcome)
            finally:
                writing.cancel()
                call.cancel()
        except (grpc.aio.AioRpcError, ServiceError) as error:
            self.lose(f"{self.name} at {self.address}: {message_of(error)}")
        else:
            self.lose(f"{self.name} at {self.address} ended its stream")

    async def _write(self, call: Any) -> None:
        way = "socket" if isinstance(call, LocalCall) else "grpc"
        while True:
            operations = [await self._operations.get()]
            while not self._operations.empty():
                operations.append(self._operations.get_nowait())
            header, self._told = None if self._told else self._header, True
            request = simulator_pb2.StepRequest(
                header=header,
                pool=self.name,
                pool_incarnation=self._message.pool_incarnation,
                operations=operations,
            )
            self._sent[way] += len(operations)
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream has ended: who reads it learns why


class Pools:
    """The pools of a run, which are used from stream to stream: steps are counted for as long as a pool lives."""

    def __init__(self, blobs: BlobReader, token: str | None, step_timeout_s: float) -> None:
        self.asked = BusyTime()
        """Times in which some environment was asked to do something."""
        self.operations: Counter[str] = Counter()
        """What they were asked, by the way that it went: `socket` of the host, or `grpc`."""
        self._blobs, self._token, self._step_timeout_s = blobs, token, step_timeout_s
        self._pools: dict[tuple[str, str, str], Pool] = {}

    def of(self, messages: Sequence[rollout_pb2.EnvironmentPool]) -> list[Pool]:
        """The pools that a stream's opening names, under the authority that it gives. Raises ServiceError INVALID."""
        check_pools(messages)
        found = []
        for message in messages:
            key = (message.address, message.pool, message.pool_incarnation)
            if key not in self._pools:
                self._pools[key] = Pool(
                    message, self._token, self._blobs, self._step_timeout_s, self.asked, self.operations
                )
            self._pools[key].under(message.header)
            found.append(self._pools[key])
        return found

    async def close(self) -> None:
        """Ends all streams; pools stay open at their simulators."""
        for pool in self._pools.values():
            await pool.close()
        await self._blobs.close()


def check_pools(pools: Sequence[rollout_pb2.EnvironmentPool]) -> None:
    """Raises INVALID for an opening that gives no environment, or one that is not whole."""
    if not pools:
        raise invalid("pools: give at least one pool of environments")
    for pool in pools:
        if pool.count < 1 or not (pool.address and pool.pool and pool.pool_incarnation and pool.task):
            raise invalid(
                f"pools: {pool.pool!r} needs address, pool, pool_incarnation, task and a count from 1"
            )
    names = [(pool.address, pool.pool) for pool in pools]
    if len(set(names)) < len(names):
        raise invalid("pools: a pool is named twice")


def arrays_of(outcome: Outcome, bodies: Bodies, *, final: bool = False) -> dict[str, np.ndarray]:
    """The observation by name; `final`: the ended episode's last, where the pool resets by itself.

    An array of a body of `bodies` lies in its memory.
    """
    tensors = outcome.final_observation if final and outcome.final_observation else outcome.observation
    return {
        name: decode_tensor(each, max_bytes=MAX_OBSERVATION_BYTES, body=bodies.get(each.blob.digest))
        for name, each in tensors.items()
    }
