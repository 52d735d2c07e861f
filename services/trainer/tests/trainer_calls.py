"""The coordinator's side of one trainer: settled groups of given ids, and every call with a valid header."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_servicekit.instance import Instance
from headrace_servicekit.rpc.digests import set_digest, trajectory_digest
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_trainer.learning.samples import Sample
from msgspec.structs import replace

VOCABULARY = 32
TORCH_TYPES = {
    common_pb2.DATA_TYPE_FLOAT32: torch.float32,
    common_pb2.DATA_TYPE_FLOAT64: torch.float64,
    common_pb2.DATA_TYPE_INT64: torch.int64,
}


def random_sequences(seed: int, *, count: int = 4, prompt: int = 9, version: int = 1) -> list[Sample]:
    """Sequences of one group: a shared prompt, answers that partly begin alike."""
    rng = random.Random(seed)
    start = [rng.randrange(3, VOCABULARY) for _ in range(prompt)]
    beginning = [rng.randrange(3, VOCABULARY) for _ in range(2)]
    found = []
    for index in range(count):
        answer = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 6))]
        answer = beginning + answer if index % 2 else answer
        trained = list(range(prompt, prompt + len(answer)))
        log_probs = [rng.uniform(-4, -0.1) for _ in answer]
        found.append(Sample(start + answer, trained, log_probs, [rng.gauss(0, 1)] * len(answer), 1.0))
    return found


class Engine:
    """Whether it tells log-probs: the run that was opened last is not deterministic, and so takes any."""

    tells = True


def settled_group(
    prompt: int, *, version: common_pb2.PolicyVersion, rewards: list[float] | None = None, attempt: int = 1
) -> trainer_pb2.SettledGroup:
    """A settled group as the coordinator sends it, with log-probs that no engine computes, where a run takes them."""
    group = trainer_pb2.SettledGroup(prompt_ordinal=prompt)
    for index, sequence in enumerate(random_sequences(prompt)):
        sequence = sequence if Engine.tells else replace(sequence, engine_log_probs=[])
        trajectory = settled_trajectory(prompt, index, attempt, sequence, version.number)
        reward = (rewards or [1.0, 0.0, 0.5, 0.0])[index]
        group.members.add(trajectory=trajectory, reward=reward, oldest_version=version)
    return group


def settled_trajectory(
    prompt: int, index: int, attempt: int, sequence: Sample, number: int
) -> common_pb2.Trajectory:
    """A finished trajectory of given ids."""
    first = sequence.trained[0]
    distribution = common_pb2.SamplingDistribution(
        temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED
    )
    trajectory = common_pb2.Trajectory(
        sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=index),
        attempt=attempt,
        finish_reason=common_pb2.FINISH_REASON_EOS,
    )
    branch = trajectory.branches.add()
    branch.segments.add(tokens=common_pb2.TokenSegment(token_ids=sequence.tokens[:first]))
    branch.segments.add(
        policy_number=number,
        tokens=common_pb2.TokenSegment(
            token_ids=sequence.tokens[first:], log_probs=sequence.engine_log_probs, distribution=distribution
        ),
    )
    trajectory.body_digest = trajectory_digest(trajectory)
    return trajectory


def digest_of(groups: list[trainer_pb2.SettledGroup]) -> str:
    """Set digest over settled groups."""
    return set_digest(
        (
            group.prompt_ordinal,
            m.trajectory.sample.sample_index,
            m.trajectory.attempt,
            m.trajectory.body_digest,
        )
        for group in groups
        for m in group.members
    )


class TrainerClient:
    """The coordinator's side of one trainer: every call with a valid header."""

    run = "runs/test"
    instance: Instance

    def __init__(self, channel: Any, directory: Path, make_config: Callable[..., dict[str, Any]]) -> None:
        self.channel = channel
        self.stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        self.directory = directory
        self.epoch = 1
        self.lease = 11
        self._make_config = make_config
        self._generation = 0
        self._number = 0

    def header(self, run: str | None = None) -> common_pb2.CommandHeader:
        return common_pb2.CommandHeader(
            run=run or self.run, coordinator_epoch=self.epoch, lease_epoch=self.lease
        )

    async def open_run(self, config: dict[str, Any], run: str | None = None) -> Any:
        Engine.tells = not config.get("deterministic", False)
        return await self.stub.OpenRun(
            trainer_pb2.OpenRunRequest(
                header=self.header(run), config_json=json.dumps(config), run_directory=str(self.directory)
            )
        )

    async def open(self, config: dict[str, Any] | None = None, checkpoint: str = "", number: int = 1) -> Any:
        await self.open_run(config or self._make_config())
        self._generation = max(1, self._generation)
        await self.join(self._generation)
        return await self.restore(checkpoint, number)

    async def join(
        self, generation: int, rank: int = 0, world_size: int = 1, rendezvous: str = "", timeout_s: int = 30
    ) -> Any:
        return await self.stub.JoinTrainerGroup(
            trainer_pb2.JoinTrainerGroupRequest(
                header=self.header(),
                generation=generation,
                rank=rank,
                world_size=world_size,
                rendezvous=rendezvous,
                timeout=duration_pb2.Duration(seconds=timeout_s),
            )
        )

    async def leave(self, generation: int, *, carry: bool = False) -> Any:
        return await self.stub.LeaveTrainerGroup(
            trainer_pb2.LeaveTrainerGroupRequest(header=self.header(), generation=generation, carry=carry)
        )

    async def take_up(self, number: int) -> Any:
        request = trainer_pb2.RestoreRequest(header=self.header(), number=number, carried=True)
        return await self.stub.Restore(request)

    async def restore(
        self, checkpoint: str, number: int, source: str = "", *, weights_only: bool = False
    ) -> Any:
        self._number = max(self._number, number)
        return await self.stub.Restore(
            trainer_pb2.RestoreRequest(
                header=self.header(),
                checkpoint=checkpoint,
                number=number,
                store_id="store",
                source_run_directory=source,
                weights_only=weights_only,
            )
        )

    async def reopen(self) -> Any:
        """The initial model again, under a new number."""
        await self.close_run()
        return await self.open(number=self._number + 10)

    async def reopen_with(self, config: dict[str, Any]) -> Any:
        """The version of the initial model again, with this config."""
        await self.close_run()
        return (await self.open(config, number=self._number + 10)).version

    async def close_run(self) -> Any:
        return await self.stub.CloseRun(trainer_pb2.CloseRunRequest(header=self.header()))

    async def begin(self, step: int, attempt: int, base: int, following: int) -> Any:
        return await self.stub.BeginStep(
            trainer_pb2.BeginStepRequest(
                header=self.header(), step=step, attempt=attempt, base_number=base, next_number=following
            )
        )

    async def learn(self, step: int, attempt: int, groups: list[trainer_pb2.SettledGroup]) -> list[Any]:
        """One message a group on one stream."""

        async def requests() -> AsyncIterator[trainer_pb2.LearnRequest]:
            for index, group in enumerate(groups):
                header = self.header() if index == 0 else None
                yield trainer_pb2.LearnRequest(header=header, step=step, attempt=attempt, groups=[group])

        return [response async for response in self.stub.Learn(requests(), timeout=240)]

    async def commit(
        self, step: int, attempt: int, base: int, following: int, digest: str, manifest: bytes = b"manifest"
    ) -> Any:
        return await self.stub.CommitStep(
            trainer_pb2.CommitStepRequest(
                header=self.header(),
                step=step,
                attempt=attempt,
                base_number=base,
                next_number=following,
                set_digest=digest,
                step_manifest=manifest,
            )
        )

    async def record(self, step: int, attempt: int, number: int, *, publish: bool = False) -> Any:
        return await self.stub.RecordStep(
            trainer_pb2.RecordStepRequest(
                header=self.header(), step=step, attempt=attempt, number=number, publish=publish
            )
        )

    async def abort(self, step: int, attempt: int) -> Any:
        return await self.stub.AbortStep(
            trainer_pb2.AbortStepRequest(header=self.header(), step=step, attempt=attempt)
        )

    async def state(self) -> Any:
        return await self.stub.GetStepState(trainer_pb2.GetStepStateRequest(header=self.header()))

    async def publish(self, number: int) -> Any:
        return await self.stub.PublishPolicy(
            trainer_pb2.PublishPolicyRequest(header=self.header(), number=number)
        )

    async def body(self, number: int) -> bytes:
        """A published body, fetched over gRPC."""
        stub = weights_pb2_grpc.WeightServiceStub(self.channel)
        request = weights_pb2.FetchWeightsRequest(run=self.run, number=number)
        return b"".join([piece.data async for piece in stub.FetchWeights(request, timeout=120)])

    async def weights(self, number: int) -> dict[str, torch.Tensor]:
        """Publishes fp32 weights and takes them from the body, by name."""
        entries = (await self.publish(number)).manifest.entries
        body = bytearray(await self.body(number))
        return {
            entry.name: torch.frombuffer(
                body, dtype=torch.float32, offset=entry.offset_bytes, count=entry.size_bytes // 4
            ).view(*entry.shape)
            for entry in entries
        }

    async def save(
        self, number: int, *, wait: bool = True, ledger: bytes = b"ledger", retained: Collection[str] = ()
    ) -> Any:
        return await self.stub.SaveCheckpoint(
            trainer_pb2.SaveCheckpointRequest(
                header=self.header(), number=number, wait=wait, ledger=ledger, retained_checkpoints=retained
            )
        )

    async def checkpoints(self, source: str = "") -> Any:
        return await self.stub.ListCheckpoints(
            trainer_pb2.ListCheckpointsRequest(header=self.header(), source_run_directory=source)
        )

    async def ledger(self, checkpoint: str, source: str = "") -> list[bytes]:
        """The pieces of a checkpoint's ledger."""
        request = trainer_pb2.FetchLedgerRequest(
            header=self.header(), checkpoint=checkpoint, source_run_directory=source
        )
        return [piece.data async for piece in self.stub.FetchLedger(request, timeout=120)]

    async def export(self, name: str) -> Any:
        return await self.stub.ExportModel(trainer_pb2.ExportModelRequest(header=self.header(), name=name))

    async def train(self, version: Any, steps: int) -> Any:
        """Committed and recorded steps of three groups each; the last version."""
        for _ in range(steps):
            number = version.number + 1
            prompts = range(100 * version.ordinal, 100 * version.ordinal + 3)
            groups = [settled_group(prompt, version=version) for prompt in prompts]
            await self.begin(version.ordinal, 1, version.number, number)
            await self.learn(version.ordinal, 1, groups)
            reply = await self.commit(version.ordinal, 1, version.number, number, digest_of(groups))
            await self.record(version.ordinal, 1, number)
            version = reply.version
        return version

    async def infer(self, trajectories: list[common_pb2.Trajectory], kind: int = 1) -> Any:
        request = trainer_pb2.InferRequest(header=self.header(), kind=kind, trajectories=trajectories)
        return await self.stub.Infer(request)

    async def suspend(self) -> Any:
        return await self.stub.Suspend(trainer_pb2.SuspendRequest(header=self.header()))

    async def wake(self) -> Any:
        return await self.stub.Wake(trainer_pb2.WakeRequest(header=self.header()))


async def refused(call: Awaitable[Any]) -> str:
    """The reason that a call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(reason_of(caught.value))


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """The reason and the message that a call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(reason_of(caught.value)), message_of(caught.value)


async def names(client: TrainerClient, source: str = "") -> list[str]:
    """Names of the checkpoints that a trainer lists."""
    return [entry.name for entry in (await client.checkpoints(source)).checkpoints]
