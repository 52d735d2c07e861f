"""Imaginary instances: what rollout, trainer and reward promise in the contracts, without any model.

A trainer's "weights" are the list of slots in them, so that what was trained can be read off the weights.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_servicekit.digests import digest_bytes, set_digest, trajectory_digest

from headrace_coordinator.ports import CallRefused

Weights = tuple[tuple[int, int], ...]
"""Slots (prompt, sample) that went into a version, in order of steps."""


@dataclass
class Disk:
    """Checkpoints that outlive trainers: (name, version, weights, ledger), newest last."""

    checkpoints: list[tuple[str, common.PolicyVersion, Weights, bytes, str]] = field(default_factory=list)


@dataclass
class Instance:
    """What every imaginary instance has: a life, leases, a fence."""

    KIND: ClassVar[str] = ""
    name: str
    incarnation: str
    rng: random.Random
    devices: tuple[str, ...] = ()
    alive: bool = True
    cut_off: bool = False
    coordinator_epoch: int = 0
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    def fence(self, header: common.CommandHeader, *, lease: bool) -> None:
        """Refuses an old coordinator and a lease that is not held."""
        if header.coordinator_epoch < self.coordinator_epoch:
            raise CallRefused(self.incarnation, "EPOCH_STALE", "coordinator epoch")
        self.coordinator_epoch = header.coordinator_epoch
        if lease and header.lease_epoch not in self.live_leases():
            raise CallRefused(self.incarnation, "EPOCH_STALE", f"lease {header.lease_epoch} is not held")

    def live_leases(self) -> set[int]:
        """Leases whose own deadline has not passed: the holder quiesces by its own clock."""
        now = asyncio.get_running_loop().time()
        return {epoch for epoch in self.held if now < self.deadlines.get(epoch, 0.0)}

    def using(self) -> set[str]:
        """Devices that it works on now."""
        return (
            {device for epoch in self.live_leases() for device in self.held[epoch]} if self.alive else set()
        )

    async def handle(self, method: str, request: Any) -> Any:
        """A unary call, killed with the instance."""
        return await self._mortal(getattr(self, method)(request))

    def handle_stream(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """A stream."""
        stream: AsyncIterator[Any] = getattr(self, method)(requests)
        return stream

    async def _mortal(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        try:
            return await task
        finally:
            self.tasks.discard(task)

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        for task in self.tasks:
            task.cancel()


@dataclass
class Rollout(Instance):
    """Generates pseudo-tokens that depend on (prompt, sample) only, keeps custody, obeys strict installs."""

    KIND: ClassVar[str] = "rollout"
    version: common.PolicyVersion = field(default_factory=common.PolicyVersion)
    custody: dict[tuple[int, int], common.Trajectory] = field(default_factory=dict)
    paused: bool = False
    running: int = 0

    async def OpenRun(self, request: rollout.OpenRunRequest) -> rollout.OpenRunResponse:
        self.fence(request.header, lease=False)
        return rollout.OpenRunResponse(max_concurrency=8, max_context_tokens=512)

    async def CloseRun(self, request: rollout.CloseRunRequest) -> rollout.CloseRunResponse:
        self.fence(request.header, lease=False)
        self.custody.clear()
        return rollout.CloseRunResponse()

    async def InstallPolicy(self, request: rollout.InstallPolicyRequest) -> rollout.InstallPolicyResponse:
        self.fence(request.header, lease=True)
        if self.running and self.version.number != request.version.number:
            raise CallRefused(self.incarnation, "POLICY_MISMATCH", "sequences of another version live")
        await asyncio.sleep(0.05)
        self.version = request.version
        return rollout.InstallPolicyResponse(version=self.version)

    async def Generate(
        self, requests: AsyncIterator[rollout.GenerateRequest]
    ) -> AsyncIterator[rollout.GenerateResponse]:
        opening = (await anext(aiter(requests))).open
        self.fence(opening.header, lease=True)
        if opening.policy_number != self.version.number:
            raise CallRefused(self.incarnation, "POLICY_MISMATCH", "another version is installed")
        done: asyncio.Queue[common.Trajectory] = asyncio.Queue()
        work: set[asyncio.Future[None]] = set()
        reading = asyncio.ensure_future(self._read(requests, opening, done, work))
        try:
            while not (reading.done() and not work and done.empty()):
                waiting = asyncio.ensure_future(done.get())
                pending: set[asyncio.Future[Any]] = {waiting}
                pending.update(work)
                if not reading.done():
                    pending.add(reading)
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                work -= {task for task in work if task.done()}
                if waiting.done():
                    body = waiting.result()
                    chunk = common.TrajectoryChunk(sample=body.sample, attempt=body.attempt, finished=body)
                    yield rollout.GenerateResponse(chunks=[chunk])
                else:
                    waiting.cancel()
        finally:
            for task in (reading, *work):
                task.cancel()

    async def _read(
        self,
        requests: AsyncIterator[rollout.GenerateRequest],
        opening: rollout.GenerateOpen,
        done: asyncio.Queue[common.Trajectory],
        work: set[asyncio.Future[None]],
    ) -> None:
        async for request in requests:
            for group in request.assign.groups:
                for sample in group.samples:
                    made = self._make(opening, group.prompt_ordinal, sample, done)
                    work.add(asyncio.ensure_future(made))

    async def _make(
        self,
        opening: rollout.GenerateOpen,
        prompt: int,
        sample: rollout.SampleAssignment,
        done: asyncio.Queue[common.Trajectory],
    ) -> None:
        length = 1 + zlib.crc32(f"{opening.seed}/{prompt}/{sample.sample_index}".encode()) % 12
        self.running += 1
        try:
            await asyncio.sleep(length * self.rng.uniform(0.05, 0.2))
        finally:
            self.running -= 1
        failed = not opening.evaluation and self.rng.random() < 0.01
        body = common.Trajectory(
            sample=common.SampleKey(prompt_ordinal=prompt, sample_index=sample.sample_index),
            attempt=sample.attempt,
            finish_reason=common.FINISH_REASON_ERROR if failed else common.FINISH_REASON_EOS,
            producer=self.incarnation,
        )
        segment = body.segments.add(policy_number=self.version.number)
        segment.tokens.token_ids.extend(range(length))
        segment.tokens.log_probs.extend([-1.0] * length)
        body.body_digest = trajectory_digest(body)
        if not opening.evaluation and not failed and self.live_leases():
            self.custody[prompt, sample.sample_index] = body
        done.put_nowait(body)

    async def Pause(self, request: rollout.PauseRequest) -> rollout.PauseResponse:
        self.fence(request.header, lease=False)
        self.paused = True
        return rollout.PauseResponse()

    async def Resume(self, request: rollout.ResumeRequest) -> rollout.ResumeResponse:
        self.fence(request.header, lease=False)
        self.paused = False
        return rollout.ResumeResponse()

    async def Abort(self, request: rollout.AbortRequest) -> rollout.AbortResponse:
        self.fence(request.header, lease=False)
        return rollout.AbortResponse()

    async def Suspend(self, request: rollout.SuspendRequest) -> rollout.SuspendResponse:
        self.fence(request.header, lease=False)
        if not self.paused:
            raise CallRefused(self.incarnation, "NOT_PAUSED", "pause first")
        self.version = common.PolicyVersion()
        return rollout.SuspendResponse()

    async def Wake(self, request: rollout.WakeRequest) -> rollout.WakeResponse:
        self.fence(request.header, lease=True)
        return rollout.WakeResponse()

    async def ListInventory(self, request: rollout.ListInventoryRequest) -> rollout.ListInventoryResponse:
        self.fence(request.header, lease=False)
        return rollout.ListInventoryResponse(
            items=[
                rollout.InventoryItem(sample=b.sample, attempt=b.attempt, body_digest=b.body_digest)
                for b in self.custody.values()
            ]
        )

    async def FetchTrajectories(
        self, requests: AsyncIterator[rollout.FetchTrajectoriesRequest]
    ) -> AsyncIterator[rollout.FetchTrajectoriesResponse]:
        request = await anext(aiter(requests))
        self.fence(request.header, lease=False)
        keys = [(key.prompt_ordinal, key.sample_index) for key in request.samples]
        yield rollout.FetchTrajectoriesResponse(
            trajectories=[self.custody[key] for key in keys if key in self.custody]
        )

    async def ReleaseTrajectories(
        self, request: rollout.ReleaseTrajectoriesRequest
    ) -> rollout.ReleaseTrajectoriesResponse:
        self.fence(request.header, lease=False)
        for key in request.samples:
            self.custody.pop((key.prompt_ordinal, key.sample_index), None)
        return rollout.ReleaseTrajectoriesResponse()


@dataclass
class Reward(Instance):
    """Rewards that depend on (prompt, sample) only; now and then a scorer breaks once."""

    KIND: ClassVar[str] = "reward"

    async def OpenRun(self, request: reward.OpenRunRequest) -> reward.OpenRunResponse:
        self.fence(request.header, lease=False)
        return reward.OpenRunResponse(scorer_digest="simulated")

    async def CloseRun(self, request: reward.CloseRunRequest) -> reward.CloseRunResponse:
        return reward.CloseRunResponse()

    async def Score(
        self, requests: AsyncIterator[reward.ScoreRequest]
    ) -> AsyncIterator[reward.ScoreResponse]:
        async for request in requests:
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            items = list(request.items)
            self.rng.shuffle(items)
            for item in items:
                broken = not item.evaluation and self.rng.random() < 0.005
                yield reward.ScoreResponse(
                    results=[
                        reward.ScoreResult(
                            sample=item.sample,
                            attempt=item.attempt,
                            status=reward.SCORE_STATUS_SCORER_BROKEN if broken else reward.SCORE_STATUS_OK,
                            reward=float((item.sample.prompt_ordinal + item.sample.sample_index) % 2),
                            evaluation=item.evaluation,
                        )
                    ]
                )


@dataclass
class Trainer(Instance):
    """The step state machine of the contract, on weights that are lists of slots."""

    KIND: ClassVar[str] = "trainer"
    disk: Disk = field(default_factory=Disk)
    generation: int = 0
    phase: int = trainer.STEP_PHASE_UNSPECIFIED
    version: common.PolicyVersion = field(default_factory=common.PolicyVersion)
    weights: Weights = ()
    attempt: tuple[int, int] = (0, 0)
    next_number: int = 0
    groups: dict[int, list[tuple[int, int, int, str]]] = field(default_factory=dict)
    commit: trainer.CommitStepResponse = field(default_factory=trainer.CommitStepResponse)

    def _refuse(self, reason: str, message: str) -> CallRefused:
        return CallRefused(self.incarnation, reason, message)

    async def OpenRun(self, request: trainer.OpenRunRequest) -> trainer.OpenRunResponse:
        self.fence(request.header, lease=False)
        return trainer.OpenRunResponse(barrier=trainer.BARRIER_GROUP)

    async def CloseRun(self, request: trainer.CloseRunRequest) -> trainer.CloseRunResponse:
        return trainer.CloseRunResponse()

    async def JoinGang(self, request: trainer.JoinGangRequest) -> trainer.JoinGangResponse:
        self.fence(request.header, lease=False)
        self.generation = request.generation
        return trainer.JoinGangResponse(generation=self.generation)

    async def GetStepState(self, request: trainer.GetStepStateRequest) -> trainer.GetStepStateResponse:
        self.fence(request.header, lease=False)
        return trainer.GetStepStateResponse(
            phase=self.phase,  # type: ignore[arg-type]
            version=self.version,
            step=self.attempt[0],
            attempt=self.attempt[1],
            accumulated_prompts=list(self.groups),
            commit=self.commit if self.phase == trainer.STEP_PHASE_COMMITTED else None,
            generation=self.generation,
        )

    async def Restore(self, request: trainer.RestoreRequest) -> trainer.RestoreResponse:
        self.fence(request.header, lease=True)
        await asyncio.sleep(0.5)
        ordinal = 0
        weights: Weights = ()
        for name, version, saved, _, _ in self.disk.checkpoints:
            if name == request.checkpoint:
                ordinal, weights = version.ordinal, saved
        parent = next((c[1].number for c in self.disk.checkpoints if c[0] == request.checkpoint), 0)
        self._hold(weights, request.number, parent, ordinal)
        self.groups, self.attempt = {}, (0, 0)
        return trainer.RestoreResponse(version=self.version)

    def _hold(self, weights: Weights, number: int, parent: int, ordinal: int) -> None:
        self.weights = weights
        digest = digest_bytes(repr(weights).encode())
        self.version = common.PolicyVersion(number=number, parent=parent, ordinal=ordinal, digest=digest)
        self.phase = trainer.STEP_PHASE_IDLE

    async def BeginStep(self, request: trainer.BeginStepRequest) -> trainer.BeginStepResponse:
        self.fence(request.header, lease=True)
        key = (request.step, request.attempt)
        if self.phase == trainer.STEP_PHASE_ACCUMULATING and self.attempt == key:
            return trainer.BeginStepResponse()
        if self.phase != trainer.STEP_PHASE_IDLE or self.version.number != request.base_number:
            raise self._refuse("CONFLICT", f"cannot begin {key} in phase {self.phase}")
        self.phase, self.attempt, self.groups = trainer.STEP_PHASE_ACCUMULATING, key, {}
        self.next_number = request.next_number
        return trainer.BeginStepResponse()

    async def Learn(
        self, requests: AsyncIterator[trainer.LearnRequest]
    ) -> AsyncIterator[trainer.LearnResponse]:
        async for request in requests:
            self.fence(request.header, lease=True)
            for group in request.groups:
                await asyncio.sleep(self.rng.uniform(0.05, 0.3))
                yield trainer.LearnResponse(outcomes=[self._accumulate(request, group)])

    def _accumulate(self, request: trainer.LearnRequest, group: trainer.SettledGroup) -> trainer.GroupOutcome:
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != (request.step, request.attempt):
            raise self._refuse("CONFLICT", "no such attempt is open")
        members = [
            (
                m.trajectory.sample.prompt_ordinal,
                m.trajectory.sample.sample_index,
                m.trajectory.attempt,
                m.trajectory.body_digest,
            )
            for m in group.members
        ]
        if self.rng.random() < 0.005:
            return trainer.GroupOutcome(
                prompt_ordinal=group.prompt_ordinal, disposition=trainer.GROUP_DISPOSITION_NONFINITE
            )
        self.groups[group.prompt_ordinal] = members
        return trainer.GroupOutcome(
            prompt_ordinal=group.prompt_ordinal,
            disposition=trainer.GROUP_DISPOSITION_ACCUMULATED,
            digest=set_digest(members),
        )

    async def CommitStep(self, request: trainer.CommitStepRequest) -> trainer.CommitStepResponse:
        self.fence(request.header, lease=True)
        key = (request.step, request.attempt)
        if self.phase == trainer.STEP_PHASE_COMMITTED and self.attempt == key:
            return self.commit
        if self.phase != trainer.STEP_PHASE_ACCUMULATING or self.attempt != key:
            raise self._refuse("CONFLICT", f"attempt {key} is not open")
        members = [member for prompt in sorted(self.groups) for member in self.groups[prompt]]
        if set_digest(members) != request.set_digest:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_SET_MISMATCH)
        await asyncio.sleep(0.3)
        if self.rng.random() < 0.02:
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
            return trainer.CommitStepResponse(result=trainer.COMMIT_RESULT_NONFINITE)
        base = self.version
        slots = tuple((prompt, sample) for prompt, sample, _, _ in sorted(members))
        self._hold(self.weights + slots, request.next_number, base.number, base.ordinal + 1)
        self.phase = trainer.STEP_PHASE_COMMITTED
        self.commit = trainer.CommitStepResponse(
            result=trainer.COMMIT_RESULT_COMMITTED,
            version=self.version,
            group_count=len(self.groups),
            sequence_count=len(members),
            token_count=len(members),
            tokens_by_version={base.number: len(members)},
        )
        return self.commit

    async def RecordStep(self, request: trainer.RecordStepRequest) -> trainer.RecordStepResponse:
        self.fence(request.header, lease=False)
        if self.attempt == (request.step, request.attempt) and self.phase == trainer.STEP_PHASE_COMMITTED:
            self.phase = trainer.STEP_PHASE_IDLE
        return trainer.RecordStepResponse()

    async def AbortStep(self, request: trainer.AbortStepRequest) -> trainer.AbortStepResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_ACCUMULATING and self.attempt == (request.step, request.attempt):
            self.phase, self.groups = trainer.STEP_PHASE_IDLE, {}
        return trainer.AbortStepResponse()

    async def PublishPolicy(self, request: trainer.PublishPolicyRequest) -> trainer.PublishPolicyResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED or self.version.number != request.number:
            raise self._refuse("CONFLICT", f"version {request.number} is not held and recorded")
        return trainer.PublishPolicyResponse(version=self.version)

    async def SaveCheckpoint(self, request: trainer.SaveCheckpointRequest) -> trainer.SaveCheckpointResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED or self.version.number != request.number:
            raise self._refuse("CONFLICT", f"version {request.number} is not held and recorded")
        name = f"lineage-{self.generation}/step-{self.version.ordinal}-{request.number}"
        entry = (name, self.version, self.weights, request.ledger, "")

        async def write() -> None:
            await asyncio.sleep(self.rng.uniform(0.2, 2.0))
            if entry not in self.disk.checkpoints:
                self.disk.checkpoints.append(entry)

        writing = asyncio.ensure_future(self._mortal(write()))
        if request.wait:
            await writing
        return trainer.SaveCheckpointResponse(
            checkpoint=trainer.Checkpoint(name=name, version=self.version), durable=request.wait
        )

    async def ListCheckpoints(
        self, request: trainer.ListCheckpointsRequest
    ) -> trainer.ListCheckpointsResponse:
        return trainer.ListCheckpointsResponse(
            checkpoints=[
                trainer.Checkpoint(name=name, version=version, ledger=ledger)
                for name, version, _, ledger, _ in reversed(self.disk.checkpoints)
            ]
        )

    async def ExportModel(self, request: trainer.ExportModelRequest) -> trainer.ExportModelResponse:
        self.fence(request.header, lease=False)
        return trainer.ExportModelResponse(path="/export")

    async def Suspend(self, request: trainer.SuspendRequest) -> trainer.SuspendResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED:
            raise self._refuse("CONFLICT", "inside a commit")
        return trainer.SuspendResponse()

    async def Wake(self, request: trainer.WakeRequest) -> trainer.WakeResponse:
        self.fence(request.header, lease=True)
        return trainer.WakeResponse()
