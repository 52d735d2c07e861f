"""A pool of environments at a simulator, behind one Step stream. Knows no policy and no episode.

Steps are counted here for as long as the pool lives, over all streams of the run that use it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.process.local import LocalCall, nearest
from headrace_servicekit.rpc.client import deadlines_enabled, dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tensors import write_tensor

from headrace_rollout.engines.figures import BusyTime
from headrace_rollout.environments.outcomes import Answer, Outcome, Shown, Waiting, shown_of_batch

RESET_S = 300.0
"""Longest a reset may take. The simulator's own limits are shorter: this one is for a simulator that hangs."""

Operation = simulator_pb2.EnvironmentOperation
ChunkBatch = simulator_pb2.ChunkBatch


class PoolLost(Exception):
    """The pool answers no more."""


class EnvironmentLost(Exception):
    """One environment's process died or hung; it is made anew at the next reset."""


class Environment:
    """One environment of a pool; one episode at a time, which holds `turn`."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.turn = asyncio.Lock()
        self.bodies: dict[str, bytearray] = {}
        """What the last outcome refers to, by digest."""
        self.kept: Any = None
        """What an episode that goes on in the next sample has left here; gone with the next reset."""
        self.due = math.inf
        """When the operation under way has to be answered, by the loop's clock."""
        self.pool, self.index = pool, index
        self.next_step = 0
        self._waiting: Waiting[Any] | None = None
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
        answered: Waiting[Outcome],
        options_json: str = "",
        *,
        until_success: bool = False,
    ) -> None:
        """Begins an episode, with `options_json` in place of the start's own if given; else as `Pool.act`."""
        reset = simulator_pb2.ResetOperation(
            seed=start.seed,
            record=start.record,
            options_json=options_json or start.options_json,
            until_success=until_success,
        )
        self.kept = None
        if start.HasField("init_state"):
            reset.init_state = start.init_state
        self._operate(Operation(reset=reset), 0, answered)

    async def say(self, content: str) -> Outcome:
        """Takes a turn of a conversation. Raises as `settled`."""
        return await self._outcome(Operation(turn=simulator_pb2.AssistantTurn(content=content)))

    async def wait(self, seconds: float) -> Outcome:
        """Waits so long for the end of an agent; the outcome is `terminated` once it has ended. Raises as `settled`."""
        waits = simulator_pb2.AwaitAgent()
        waits.wait.FromNanoseconds(int(seconds * 1e9))
        return await self._outcome(Operation(await_agent=waits))

    def end_agent(self) -> None:
        """Kills an agent that still runs, at once or when the operation under way is answered; waits for nothing."""
        if not self._idle.is_set():
            self._ends_next = True
        elif not self.pool.reason:
            answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            answered.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._operate(Operation(await_agent=simulator_pb2.AwaitAgent(kill=True)), 1, answered)

    async def settled(self, outcome: Outcome) -> Outcome:
        """The outcome; what it refers to is in `bodies`. Raises PoolLost, and as `check`."""
        self.check(outcome)
        self.bodies = await self.pool.fetch_blobs(outcome)
        return outcome

    async def video(self) -> bytes:
        """The MP4 file of the episode, whose start asked for it. Raises PoolLost, and ServiceError INVALID for none."""
        return await self.pool.video(self.index)

    async def _outcome(self, operation: Operation) -> Outcome:
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._operate(operation, 1, answered)
        return await self.settled(await answered)

    def _operate(self, operation: Operation, actions: int, answered: Waiting[Outcome]) -> None:
        self._send(operation)
        self.wait_for(answered, self.pool.limit_s(actions))

    def act_alone(self, chunk_CA: np.ndarray) -> None:
        """Sends a chunk. Raises PoolLost."""
        operation = Operation()
        write_tensor(operation.action_chunk, chunk_CA)
        self._send(operation)

    def _send(self, operation: Operation) -> None:
        operation.environment, operation.step_index = self.index, self.next_step
        self.pool.send(operation)

    def wait_for(self, answered: Waiting[Any], limit_s: float) -> None:
        """Gives what the operation that was sent comes to, or PoolLost, to `answered`."""
        # It is called directly, and one timer watches all environments: this is done in each step.
        self._waiting = answered
        self._idle.clear()
        self.pool.asked.begin()
        self.due = asyncio.get_running_loop().time() + limit_s
        self.pool.watch(self.due)

    @property
    def name(self) -> str:
        """For messages."""
        return f"environment {self.index} of {self.pool.task} ({self.pool.name} at {self.pool.address})"

    def check(self, outcome: Outcome) -> None:
        """Raises EnvironmentLost, PoolLost, and ServiceError REFUSED_BY_SIMULATOR with its reason."""
        if outcome.status == simulator_pb2.OUTCOME_STATUS_OK:
            return
        if outcome.status == simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST:
            raise EnvironmentLost(f"{self.name}: {outcome.detail}")
        if outcome.status == simulator_pb2.OUTCOME_STATUS_REVOKED:
            self.pool.lose(f"{self.pool.name} at {self.pool.address}: {outcome.detail}")
            raise PoolLost(self.pool.reason)
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "REFUSED_BY_SIMULATOR",
            f"{self.name} refuses: {outcome.detail}; the policy's bounds and the start states must be the "
            "environment's",
        )

    def answered(self, outcome: Outcome) -> None:
        """Takes the outcome of what was sent."""
        if outcome.status in (simulator_pb2.OUTCOME_STATUS_OK, simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST):
            self.next_step = outcome.step_index + 1
        self._settle(outcome)
        ends, self._ends_next = self._ends_next, False
        if ends and outcome.status == simulator_pb2.OUTCOME_STATUS_OK and not outcome.terminated:
            self.end_agent()

    def went_on(self, shown: Shown, row: int) -> None:
        """Takes what a batch's answer says of it."""
        self.next_step += 1
        self._settle((shown, row))

    def _settle(self, found: Answer) -> None:
        waiting = self._ended()
        if waiting is not None and not waiting.done():
            waiting.set_result(found)

    def lose(self, reason: str) -> None:
        """Raises PoolLost where an outcome is awaited."""
        waiting = self._ended()
        if waiting is not None and not waiting.done():
            waiting.set_exception(PoolLost(reason))

    def _ended(self) -> Waiting[Any] | None:
        """Ends the operation under way; returns what waits for it, which may be done."""
        if self._idle.is_set():
            return None
        waiting, self._waiting, self.due = self._waiting, None, math.inf
        self.pool.asked.end()
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
        self._operations: asyncio.Queue[Operation | ChunkBatch] = asyncio.Queue()
        self._watch: asyncio.TimerHandle | None = None
        self._channel = dial(message.address, token=token)
        self._stub: Any = simulator_pb2_grpc.SimulatorServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._reader = asyncio.create_task(self._read(), name=f"read outcomes of {self.name}")

    def under(self, header: common_pb2.CommandHeader) -> None:
        """Sets the authority of operations from now on: a Step stream is used under one lease after another."""
        if header.lease_epoch != self._header.lease_epoch:
            self._header, self._told = header, False

    def act(
        self,
        environments: Sequence[Environment],
        chunks_NCA: np.ndarray,
        answered: Sequence[Waiting[Answer]],
        *,
        together: bool,
    ) -> None:
        """Executes a chunk in each, until its episode ends; `answered` get what it came to. Raises PoolLost.

        `together` is for pools that step their environments in one call: chunks are then one message's batch.
        """
        if together:
            batch = ChunkBatch(
                environments=[each.index for each in environments],
                step_indices=[each.next_step for each in environments],
            )
            write_tensor(batch.action_chunks, chunks_NCA)
            self.send(batch)
        limit_s = self.limit_s(chunks_NCA.shape[1])
        for environment, chunk_CA, waiting in zip(environments, chunks_NCA, answered, strict=True):
            if not together:
                environment.act_alone(chunk_CA)
            environment.wait_for(waiting, limit_s)

    def send(self, operation: Operation | ChunkBatch) -> None:
        """Puts operations on the stream; raises PoolLost."""
        if self.reason:
            raise PoolLost(self.reason)
        self._operations.put_nowait(operation)

    def limit_s(self, actions: int) -> float:
        """How long so many actions may take: environments of one process take turns, each may use up its own limit."""
        return RESET_S + self.step_timeout_s * max(actions, 1) * len(self.environments)

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
        return {each.digest: await self._blobs.read(each) for each in self.references(outcome)}

    def references(self, outcome: Outcome) -> list[common_pb2.BlobRef]:
        """What an outcome refers to."""
        return [
            tensor.blob
            for tensors in (outcome.observation, outcome.final_observation)
            for tensor in tensors.values()
            if tensor.WhichOneof("body") == "blob"
        ]

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
                    if response.HasField("batch"):
                        shown, batch = shown_of_batch(response.batch), response.batch
                        for row, index in enumerate(batch.environments):
                            self.environments[index].went_on(shown, row)
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
            request = simulator_pb2.StepRequest(
                pool=self.name, pool_incarnation=self._message.pool_incarnation
            )
            asked = await self._operations.get()
            while True:
                if isinstance(asked, ChunkBatch):
                    request.batch.CopyFrom(asked)
                else:
                    request.operations.append(asked)
                # One batch a message: parts of the environments act in turn.
                if self._operations.empty() or request.HasField("batch"):
                    break
                asked = self._operations.get_nowait()
            if not self._told:
                request.header.CopyFrom(self._header)
                self._told = True
            self._sent[way] += len(request.operations) + len(request.batch.environments)
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream has ended: who reads it learns why
