"""TrainerService: gRPC to the trainer's own records and back, on one compute thread. Decides nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc
import grpc.aio
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_modelkit.devices import DeviceNotSeen, torch_devices
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.config import parse_config
from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.instance import Instance
from headrace_servicekit.lease.devices import bind_cpu, gpu_uuids
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.client import deadlines_enabled
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_enum, check_name, check_number, check_seconds

from headrace_trainer.algorithms._base import Algorithm, Barrier, given_rewards_of, turn_credit_of
from headrace_trainer.group.group import Member
from headrace_trainer.learning.samples import LearnItem
from headrace_trainer.learning.step import Begin, Commit, StepState
from headrace_trainer.trainer import Trainer
from headrace_trainer.wire import messages as wire
from headrace_trainer.wire.asked import AskedCalls, optimizer_of
from headrace_trainer.wire.calls import ComputeThread, Context, check_path, check_step, elsewhere, refusals
from headrace_trainer.wire.learn import LearnQueue, LearnStream, fetch_bodies
from headrace_trainer.wire.outputs import HelpingCalls, OutputCalls

JOIN_TIMEOUT_S = 60.0
FOLLOW_TIMEOUT_S = 55.0


class TrainerServicer(AskedCalls, HelpingCalls, OutputCalls, trainer_pb2_grpc.TrainerServiceServicer):  # type: ignore[misc]
    """The calls of trainer.proto; `instance` has the fence, the weight store and the lease."""

    def __init__(self, instance: Instance) -> None:
        trainer = Trainer(
            lambda: instance.weights,
            instance.fence.holds_any,
            deadlines=deadlines_enabled(),
            name=instance.config.name,
            incarnation=instance.config.incarnation,
            on_lost=self._on_lost,
            listen=split_address(instance.config.listen)[0],
            token=instance.token,
        )
        super().__init__(instance, trainer, ComputeThread())
        self.copies = trainer.copies
        """Versions on this rank's GPU that others map."""
        self._blobs = BlobReader(instance.config.shm_dir, instance.token)
        self._queue = self._new_queue(1)  # refuses everything until OpenRun makes the run's
        self._committing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._revoked = False
        self._learning: set[LearnStream] = set()
        instance.open_runs.limit = 1
        instance.on_grant = self._on_grant
        instance.on_revoke = self._on_revoke

    def own_device(self) -> torch.device | None:
        """Where this rank computes; None while its memory is released."""
        return self._trainer.own_device()

    # Runs and trainer groups

    async def OpenRun(
        self, request: trainer_pb2.OpenRunRequest, context: Context
    ) -> trainer_pb2.OpenRunResponse:
        header = request.header
        self._instance.fence.check(header, lease=False, opening=False)
        check_name("header.run", header.run)
        config = parse_config(TrainerConfig, request.config_json, "config_json of the trainer")
        directory = check_path("run_directory", request.run_directory)

        async def build() -> list[Algorithm]:
            algorithms = await self._compute(self._trainer.open_run, header.run, config, directory)
            self._queue = self._new_queue(config.trainer.micro_batch_tokens)
            return algorithms

        algorithms = await self._instance.open_run(header, (config, directory), build, self._end_run)
        waits = any(each.barrier is Barrier.BATCH for each in algorithms)
        given = given_rewards_of(algorithms[0])
        return trainer_pb2.OpenRunResponse(
            barrier=trainer_pb2.BARRIER_BATCH if waits else trainer_pb2.BARRIER_GROUP,
            drop_equal=all(each.refill.drop_equal for each in algorithms),
            max_refill=min(each.refill.most for each in algorithms),
            greedy_first=algorithms[0].greedy_first,
            by_turn=turn_credit_of(algorithms[0]) is not None,
            given_rewards=wire.infer_kinds(given.columns),
            given_by_token=given.by_token,
        )

    async def CloseRun(
        self, request: trainer_pb2.CloseRunRequest, context: Context
    ) -> trainer_pb2.CloseRunResponse:
        await self._instance.close_run(request.header)
        return trainer_pb2.CloseRunResponse()

    async def _end_run(self) -> None:
        """Closes the run after what is being computed, a commit too, and after the checkpoint being written."""
        self._queue.close()
        self._queue = self._new_queue(1)
        await self._compute(self._trainer.close_run)

    async def JoinTrainerGroup(
        self, request: trainer_pb2.JoinTrainerGroupRequest, context: Context
    ) -> trainer_pb2.JoinTrainerGroupResponse:
        self._check(request.header, lease=False, run=False)
        self._loop = asyncio.get_running_loop()
        check_number("generation", request.generation, 1)
        timeout = check_seconds("timeout", request.timeout) or JOIN_TIMEOUT_S
        self._instance.lost_peers.clear()
        stopped = threading.Event()
        try:
            await self._compute(
                self._trainer.join,
                request.generation,
                request.rank,
                request.world_size,
                request.rendezvous,
                timeout,
                stopped,
            )
        finally:
            stopped.set()  # Also where the caller has gone: the compute thread must be free for its next call.
        return trainer_pb2.JoinTrainerGroupResponse(generation=request.generation)

    def _on_lost(self, members: list[Member]) -> None:
        """Other ranks of the trainer group are lost, heard on its liveness thread: the coordinator looks at them."""
        if self._loop is not None and members:
            lost = {member.incarnation for member in members}
            self._loop.call_soon_threadsafe(self._instance.lost_peers_found, lost)

    async def LeaveTrainerGroup(
        self, request: trainer_pb2.LeaveTrainerGroupRequest, context: Context
    ) -> trainer_pb2.LeaveTrainerGroupResponse:
        self._check(request.header, lease=False, run=False)
        await self._compute(partial(self._trainer.leave, request.generation, carry=request.carry))
        return trainer_pb2.LeaveTrainerGroupResponse()

    async def Restore(
        self, request: trainer_pb2.RestoreRequest, context: Context
    ) -> trainer_pb2.RestoreResponse:
        self._check(request.header, lease=True)
        if self._trainer.follows():
            # The leader's round does the work; its version is the leader's to tell.
            steps = await elsewhere(self._trainer.restored_steps, FOLLOW_TIMEOUT_S)
            return trainer_pb2.RestoreResponse(warmup_steps=steps)
        check_number("number", request.number, 1)
        if request.carried:
            found = await self._obey(request.header, lambda session: session.take_up(request.number))
        else:
            source = None
            if request.source_run_directory:
                source = self._checkpoints(request.source_run_directory)
            found = await self._obey(
                request.header,
                lambda session: session.restore(
                    request.checkpoint,
                    request.number,
                    request.store_id,
                    source,
                    weights_only=request.weights_only,
                ),
            )
        return trainer_pb2.RestoreResponse(
            version=wire.version_message(found.version),
            warmup_steps=found.warmup_steps,
            figures=found.figures,
            layout=found.layout,
            notes=found.notes,
        )

    # Steps

    async def BeginStep(
        self, request: trainer_pb2.BeginStepRequest, context: Context
    ) -> trainer_pb2.BeginStepResponse:
        self._check(request.header, lease=True)
        check_step(request)
        command = Begin(request.step, request.attempt, request.base_number, request.next_number)
        await self._compute(self._session().begin, command)
        return trainer_pb2.BeginStepResponse()

    async def Learn(
        self, requests: AsyncIterator[trainer_pb2.LearnRequest], context: Context
    ) -> AsyncIterator[trainer_pb2.LearnResponse]:
        queue, stream = self._queue, LearnStream(self._queue, self._admit_learn, self._instance.open_runs)
        if queue.worker is None:
            queue.worker = asyncio.create_task(queue.work(), name="learn")
        stream.reader = asyncio.create_task(stream.read(requests), name="learn stream")
        self._learning.add(stream)
        try:
            async with aclosing(stream.outcomes()) as outcomes:
                async for seconds, records in outcomes:
                    figures = wire.metrics("learn", seconds, records)
                    self._instance.report(figures)
                    yield trainer_pb2.LearnResponse(
                        outcomes=[wire.outcome(record) for record in records], metrics=figures
                    )
        finally:
            stream.reader.cancel()
            self._learning.discard(stream)
        if stream.revoked:
            yield trainer_pb2.LearnResponse(revoked=True)

    async def CommitStep(
        self, request: trainer_pb2.CommitStepRequest, context: Context
    ) -> trainer_pb2.CommitStepResponse:
        self._check(request.header, lease=True)
        check_step(request)
        command = Commit(
            request.step,
            request.attempt,
            request.base_number,
            request.next_number,
            request.set_digest,
            digest_bytes(request.step_manifest),
            optimizer_of(request),
        )
        self._awake()
        self._committing = True
        try:
            reply = await self._obey(
                request.header, lambda session: session.commit(command, bytes(request.step_manifest))
            )
        finally:
            self._committing = False
        await failpoint("trainer.commit.before_reply")
        message = wire.commit_message(reply)
        assert message is not None
        return message

    async def RecordStep(
        self, request: trainer_pb2.RecordStepRequest, context: Context
    ) -> trainer_pb2.RecordStepResponse:
        self._check(request.header, lease=False)
        check_step(request)
        session, number = self._session(), request.number

        def record() -> None:
            session.record(request.step, request.attempt, number)

        if not request.publish:
            await self._compute(record)
            return trainer_pb2.RecordStepResponse()
        published = await self._publish(session, request.header.run, number, first=record)
        return trainer_pb2.RecordStepResponse(published=published)

    async def AbortStep(
        self, request: trainer_pb2.AbortStepRequest, context: Context
    ) -> trainer_pb2.AbortStepResponse:
        self._check(request.header, lease=False)
        check_step(request)
        await self._compute(self._session().abort, request.step, request.attempt)
        return trainer_pb2.AbortStepResponse()

    async def GetStepState(
        self, request: trainer_pb2.GetStepStateRequest, context: Context
    ) -> trainer_pb2.GetStepStateResponse:
        self._check(request.header, lease=False, run=False)
        opened = request.header.run in self._instance.open_runs
        state = self._state() if opened else StepState()
        begun = state.begun
        committed = state.phase.value == "committed"
        return trainer_pb2.GetStepStateResponse(
            phase=wire.PHASES[state.phase],
            version=wire.version_message(state.version),
            step=begun.step if begun else 0,
            attempt=begun.attempt if begun else 0,
            accumulated_prompts=[record.prompt_ordinal for record in state.accumulated],
            commit=wire.commit_message(state.last_reply) if committed else None,
            generation=self._trainer.generation,
            carried_number=self._trainer.carried_number if opened else 0,
        )

    async def Infer(self, request: trainer_pb2.InferRequest, context: Context) -> trainer_pb2.InferResponse:
        self._check(request.header, lease=True)
        check_enum("kind", trainer_pb2.InferKind, request.kind)
        if (column := wire.COLUMNS.get(request.kind)) is None:
            kind = trainer_pb2.InferKind.Name(request.kind)
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED", f"{kind} is not served; ask for LOG_PROBS"
            )
        self._awake()
        with refusals():
            sequences = self._trainer.kind.read_sequences(list(request.trajectories))
        values, version = await self._obey(
            request.header, lambda session: (session.infer(sequences, column), session.state.version)
        )
        return trainer_pb2.InferResponse(
            sequences=[trainer_pb2.InferredSequence(values=own) for own in values],
            policy_number=version.number if version else 0,
        )

    # The device

    async def Suspend(
        self, request: trainer_pb2.SuspendRequest, context: Context
    ) -> trainer_pb2.SuspendResponse:
        self._check(request.header, lease=False)
        if self._committing:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "COMMITTING",
                "a commit is running: suspend after its reply",
            )
        released, memory = await self._compute(self._trainer.suspend)
        return trainer_pb2.SuspendResponse(
            released_bytes=max(0, released), free_memory_bytes=memory.free_bytes
        )

    async def Wake(self, request: trainer_pb2.WakeRequest, context: Context) -> trainer_pb2.WakeResponse:
        self._check(request.header, lease=True)
        await self._compute(self._wake, request.header)
        return trainer_pb2.WakeResponse()

    async def close(self) -> None:
        """Leaves run and trainer group, after what is being computed."""
        self._queue.close()
        await self._compute(self._trainer.close_run)
        await self._blobs.close()
        self._compute.close()

    # Parts

    def _wake(self, header: common_pb2.CommandHeader) -> None:
        self._authorise(header)
        self._trainer.wake()

    def _state(self) -> StepState:
        return self._trainer.state()

    def _new_queue(self, micro_batch_tokens: int) -> LearnQueue:
        pool, session = self._compute.pool, self._trainer.awake_session
        return LearnQueue(
            lambda items: asyncio.get_running_loop().run_in_executor(pool, lambda: session().learn(items)),
            lambda: 2 * micro_batch_tokens * self._trainer.world_size,
        )

    async def _admit_learn(
        self, header: common_pb2.CommandHeader, request: trainer_pb2.LearnRequest
    ) -> LearnItem:
        self._check(header, lease=True)
        self._awake()
        bodies = await fetch_bodies(request.groups, self._blobs)
        with refusals():
            check_step(request)
            groups = [self._trainer.kind.read_group(group, bodies) for group in request.groups]
        return LearnItem(request.step, request.attempt, groups, partial(self._authorise, header))

    async def _on_grant(self, lease: common_pb2.Lease) -> None:
        try:
            devices = torch_devices(gpu_uuids(lease.devices))
        except DeviceNotSeen as error:
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", str(error)) from error
        self._trainer.device.use(devices, bind_cpu(lease.devices))
        if self._revoked:
            self._revoked = False
            await self._compute(self._trainer.wake)

    async def _on_revoke(self, epoch: int, notice_s: float, keep: bool = False) -> Memory:
        # A revoke undoes itself with the next grant; an explicit Suspend waits for its Wake.
        self._revoked = self._revoked or not self._trainer.suspended
        for stream in self._learning:
            if stream.lease_epoch == epoch:
                stream.revoke()
        _, memory = await self._compute(partial(self._trainer.suspend, keep=keep))
        return memory
