"""The coordinator's part of a run spoken by hand: one trainer, one engine, step by step over gRPC."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_servicekit.rpc.digests import set_digest, trajectory_digest

from harness.services.alone import CALL_S
from harness.services.fake_fleet import RUN

DISTRIBUTION = common_pb2.SamplingDistribution(
    temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED
)
SAMPLES = 4
_requests = itertools.count(1)


def header(lease_epoch: int = 0, coordinator_epoch: int = 1, run: str = RUN) -> common_pb2.CommandHeader:
    """Authority for one call."""
    return common_pb2.CommandHeader(
        request_id=f"by-hand-{next(_requests)}",
        run=run,
        coordinator_epoch=coordinator_epoch,
        lease_epoch=lease_epoch,
    )


@dataclass
class Engine:
    """A rollout that holds a lease."""

    channel: grpc.Channel
    lease: int
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = rollout_pb2_grpc.RolloutServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def open(self, model: Path) -> rollout_pb2.OpenRunResponse:
        """Opens the run and takes memory for its weights."""
        config = {"model": {"path": str(model), "dtype": "float32"}, "rollout": {}, "seed": 3}
        opened: rollout_pb2.OpenRunResponse = self.stub.OpenRun(
            rollout_pb2.OpenRunRequest(header=header(), config_json=json.dumps(config)), timeout=CALL_S
        )
        return opened

    def wake(self, scope: rollout_pb2.WakeScope = rollout_pb2.WAKE_SCOPE_UNSPECIFIED) -> None:
        """Takes memory."""
        self.stub.Wake(rollout_pb2.WakeRequest(header=header(self.lease), scope=scope), timeout=CALL_S)

    def install(
        self, published: trainer_pb2.PublishPolicyResponse, **changed: Any
    ) -> rollout_pb2.InstallPolicyResponse:
        """Installs a published version, or one changed in some fields of its name."""
        version = common_pb2.PolicyVersion()
        version.CopyFrom(published.version)
        for name, value in changed.items():
            setattr(version, name, value)
        request = rollout_pb2.InstallPolicyRequest(
            header=header(self.lease),
            version=version,
            manifest=published.manifest,
            sources=[published.source],
        )
        response: rollout_pb2.InstallPolicyResponse = self.stub.InstallPolicy(request, timeout=CALL_S)
        return response

    def generate(
        self, number: int, prompts: Iterable[int], attempt: int = 1
    ) -> dict[int, list[common_pb2.Trajectory]]:
        """Answers by prompt ordinal, in order of their samples."""

        def requests() -> Iterator[rollout_pb2.GenerateRequest]:
            opening = rollout_pb2.GenerateOpen(
                header=header(self.lease),
                policy_number=number,
                distribution=DISTRIBUTION,
                max_new_tokens=4,
                seed=3,
            )
            yield rollout_pb2.GenerateRequest(open=opening)
            samples = [
                rollout_pb2.SampleAssignment(sample_index=index, attempt=attempt) for index in range(SAMPLES)
            ]
            groups = [
                rollout_pb2.GroupAssignment(
                    prompt_ordinal=prompt, prompt=rollout_pb2.Prompt(text=f"{prompt:03d}="), samples=samples
                )
                for prompt in prompts
            ]
            yield rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups(groups=groups))

        found: dict[int, list[common_pb2.Trajectory]] = {}
        for response in self.stub.Generate(requests(), timeout=CALL_S):
            for chunk in response.chunks:
                if chunk.HasField("finished"):
                    found.setdefault(chunk.finished.sample.prompt_ordinal, []).append(chunk.finished)
        return {prompt: sorted(made, key=lambda t: t.sample.sample_index) for prompt, made in found.items()}


@dataclass
class Learner:
    """A trainer that holds a lease, alone in its trainer group."""

    channel: grpc.Channel
    lease: int
    directory: Path
    stub: Any = field(init=False)
    version: common_pb2.PolicyVersion = field(default_factory=common_pb2.PolicyVersion)
    highest: int = 0

    def __post_init__(self) -> None:
        self.stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def open(self, model: Path) -> None:
        """Opens the run."""
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "algorithm": {"group_size": SAMPLES, "prompts_per_step": 2},
            "optimizer": {"lr": 1e-3},
            "trainer": {},
            "sampling": {"max_new_tokens": 4},
            "checkpoint": {},
            "seed": 3,
            "steps": 100,
        }
        request = trainer_pb2.OpenRunRequest(
            header=header(), config_json=json.dumps(config), run_directory=str(self.directory)
        )
        self.stub.OpenRun(request, timeout=CALL_S)

    def join(
        self, generation: int, rank: int = 0, world_size: int = 1
    ) -> trainer_pb2.JoinTrainerGroupResponse:
        """Joins a trainer group."""
        request = trainer_pb2.JoinTrainerGroupRequest(
            header=header(), generation=generation, rank=rank, world_size=world_size, rendezvous="127.0.0.1:0"
        )
        request.timeout.FromSeconds(60)
        response: trainer_pb2.JoinTrainerGroupResponse = self.stub.JoinTrainerGroup(request, timeout=CALL_S)
        return response

    def restore(self, number: int) -> None:
        """The initial model as version `number`."""
        request = trainer_pb2.RestoreRequest(header=header(self.lease), number=number, store_id="by-hand")
        self.version = self.stub.Restore(request, timeout=CALL_S).version
        self.highest = number

    def publish(self) -> trainer_pb2.PublishPolicyResponse:
        """Publishes the version held."""
        request = trainer_pb2.PublishPolicyRequest(header=header(), number=self.version.number)
        response: trainer_pb2.PublishPolicyResponse = self.stub.PublishPolicy(request, timeout=CALL_S)
        return response

    def begin(self, attempt: int = 1, **changed: int) -> int:
        """Opens an attempt at the next step; returns the number burnt for its version."""
        fields = {
            "step": self.version.ordinal,
            "attempt": attempt,
            "base_number": self.version.number,
            "next_number": self.highest + 1,
        }
        request = trainer_pb2.BeginStepRequest(header=header(self.lease), **{**fields, **changed})
        self.stub.BeginStep(request, timeout=CALL_S)
        return int(request.next_number)

    def learn(
        self, groups: Sequence[trainer_pb2.SettledGroup], attempt: int = 1
    ) -> list[trainer_pb2.GroupOutcome]:
        """Sends settled groups, one message each; what became of them."""

        def requests() -> Iterator[trainer_pb2.LearnRequest]:
            for group in groups:
                yield trainer_pb2.LearnRequest(
                    header=header(self.lease), step=self.version.ordinal, attempt=attempt, groups=[group]
                )

        return [
            outcome
            for response in self.stub.Learn(requests(), timeout=CALL_S)
            for outcome in response.outcomes
        ]

    def commit(
        self, groups: Sequence[trainer_pb2.SettledGroup], number: int, attempt: int = 1, **changed: Any
    ) -> trainer_pb2.CommitStepResponse:
        """Applies the attempt that was opened with `number`."""
        fields = {
            "step": self.version.ordinal,
            "attempt": attempt,
            "base_number": self.version.number,
            "next_number": number,
            "set_digest": digest_of(groups),
            "step_manifest": b"manifest",
        }
        request = trainer_pb2.CommitStepRequest(header=header(self.lease), **{**fields, **changed})
        response: trainer_pb2.CommitStepResponse = self.stub.CommitStep(request, timeout=CALL_S)
        return response

    def record(self, committed: trainer_pb2.CommitStepResponse, attempt: int = 1) -> None:
        """The committed version is in the ledger."""
        request = trainer_pb2.RecordStepRequest(
            header=header(), step=self.version.ordinal, attempt=attempt, number=committed.version.number
        )
        self.stub.RecordStep(request, timeout=CALL_S)
        self.version = committed.version
        self.highest = committed.version.number

    def state(self) -> trainer_pb2.GetStepStateResponse:
        """Where the trainer stands."""
        response: trainer_pb2.GetStepStateResponse = self.stub.GetStepState(
            trainer_pb2.GetStepStateRequest(header=header()), timeout=CALL_S
        )
        return response

    def settle(
        self, answers: dict[int, list[common_pb2.Trajectory]], shift: float = 0.0
    ) -> list[trainer_pb2.SettledGroup]:
        """Groups with rewards that differ within each."""
        groups = []
        for prompt, made in sorted(answers.items()):
            group = trainer_pb2.SettledGroup(prompt_ordinal=prompt)
            for index, trajectory in enumerate(made):
                group.members.add(
                    trajectory=trajectory, reward=index % 2 + shift, oldest_version=self.version
                )
            groups.append(group)
        return groups


def digest_of(groups: Iterable[trainer_pb2.SettledGroup]) -> str:
    """Digest over (sample, attempt, body digest) of all members."""
    return set_digest(
        (
            group.prompt_ordinal,
            member.trajectory.sample.sample_index,
            member.trajectory.attempt,
            member.trajectory.body_digest,
        )
        for group in groups
        for member in group.members
    )


def with_other_tokens(group: trainer_pb2.SettledGroup) -> trainer_pb2.SettledGroup:
    """The same slots and attempts with another body."""
    other = trainer_pb2.SettledGroup()
    other.CopyFrom(group)
    trajectory = other.members[0].trajectory
    tokens = trajectory.branches[-1].segments[-1].tokens
    tokens.token_ids[0] = tokens.token_ids[0] ^ 1
    trajectory.body_digest = trajectory_digest(trajectory)
    return other
