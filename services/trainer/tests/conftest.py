"""Fixtures of the trainer's tests: a tiny model, a trainer group of one, backends, groups and trajectories."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.weights import load_weights
from headrace_schema.generating import ModelSection
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.digests import set_digest, trajectory_digest
from headrace_trainer.__main__ import mount
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.group.group import Gang, join_gang
from headrace_trainer.learning.packing import plan_batches, plan_rows
from headrace_trainer.learning.samples import Group, Member, Sequence

VOCABULARY = 32
TORCH_TYPES = {
    common_pb2.DATA_TYPE_FLOAT32: torch.float32,
    common_pb2.DATA_TYPE_FLOAT64: torch.float64,
    common_pb2.DATA_TYPE_INT64: torch.int64,
}


@pytest.fixture(scope="session")
def robots() -> ModuleType:
    """`robot_play.py`: environments, episodes, settled groups of them."""
    spec = importlib.util.spec_from_file_location("robot_play", Path(__file__).parent / "robot_play.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def robot_config() -> Callable[..., dict[str, Any]]:
    """Builds the JSON of OpenRun for a new `mlp`, and a short PPO; `options` are the algorithm's."""

    def make(name: str = "ppo", *, group_size: int = 1, options: Any = (), **sections: Any) -> dict[str, Any]:
        policy = {"kind": "mlp", "state_size": 6, "bounds": {"low": [-1.0, -1.0], "high": [1.0, 1.0]}}
        return {
            "model": {"policy": policy | sections.pop("policy", {})},
            "algorithm": {
                "name": name,
                "group_size": group_size,
                "prompts_per_step": 4,
                "options": dict(options),
            },
            "optimizer": {"lr": 1e-3, "beta2": 0.999, "eps": 1e-5, "grad_clip": 0.5},
            "checkpoint": {"keep": 2},
            "seed": 1,
            "steps": 10,
            **sections,
        }

    return make


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def plain_log_probs(tiny_directory: Path) -> Callable[..., list[list[float]]]:
    """Log-probs of each sequence's trained tokens under given whole weights, by transformers alone."""
    model: Any = load_model(ModelSection(path=str(tiny_directory), dtype="float32"))

    def score(weights: Any, sequences: list[Sequence]) -> list[list[float]]:
        load_weights(model, dict(weights))
        with torch.no_grad():
            rows = [model(torch.tensor([s.tokens])).logits[0].log_softmax(-1) for s in sequences]
        return [
            [float(row[position - 1, s.tokens[position]]) for position in s.trained]
            for row, s in zip(rows, sequences, strict=True)
        ]

    return score


@pytest.fixture
def gang() -> Iterator[Gang]:
    """A trainer group of one in this process."""
    gang = join_gang(1, 0, 1, "", 10.0, torch.device("cpu"))
    yield gang
    gang.leave()


@pytest.fixture
def make_config(tiny_directory: Path) -> Callable[..., dict[str, Any]]:
    """Builds the JSON of OpenRun; sections given are merged over the defaults."""

    def make(**sections: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model": {"path": str(tiny_directory), "dtype": "float32"},
            "algorithm": {"group_size": 4, "prompts_per_step": 3},
            "optimizer": {"lr": 1e-3},
            "trainer": {"micro_batch_tokens": 512},
            "checkpoint": {"keep": 2},
            "seed": 1,
            "steps": 10,
        }
        for name, value in sections.items():
            both = isinstance(value, dict) and isinstance(config.get(name), dict)
            config[name] = {**config[name], **value} if both else value
        return config

    return make


@pytest.fixture
def fetched_weights() -> Callable[..., Any]:
    """Publishes a version; its tensors by name, each of its own type, taken from the body."""

    async def fetch(client: TrainerClient, number: int) -> dict[str, torch.Tensor]:
        manifest = (await client.publish(number)).manifest
        body = bytearray(await client.body(number))
        return {
            entry.name: torch.frombuffer(
                body,
                dtype=TORCH_TYPES[entry.data_type],
                offset=entry.offset_bytes,
                count=math.prod(entry.shape),
            ).reshape(tuple(entry.shape))
            for entry in manifest.entries
        }

    return fetch


@pytest.fixture
def make_backend(gang: Gang, make_config: Callable[..., dict[str, Any]]) -> Callable[..., FsdpBackend]:
    """Builds a backend with the initial model loaded."""

    def make(**sections: Any) -> FsdpBackend:
        config = TrainerConfig.model_validate(make_config(**sections))
        backend = build_backend(config, build_algorithm(config.algorithm), gang)
        assert isinstance(backend, FsdpBackend)
        backend.load_initial()
        return backend

    return make


def random_sequences(seed: int, *, count: int = 4, prompt: int = 9, version: int = 1) -> list[Sequence]:
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
        found.append(Sequence(start + answer, trained, log_probs, [rng.gauss(0, 1)] * len(answer), 1.0))
    return found


@pytest.fixture
def sequences() -> Callable[..., list[Sequence]]:
    """See `random_sequences`."""
    return random_sequences


@pytest.fixture
def accumulate() -> Callable[..., None]:
    """Learns groups of sequences through micro-batches of a budget, the groups in the given order."""

    def run(backend: FsdpBackend, groups: list[list[Sequence]], budget: int, *, shared: bool = True) -> None:
        rows = [
            (length, [group[index] for index in members])
            for group in groups
            for length, members in plan_rows(group, budget, shared=shared)
        ]
        for batch in plan_batches([length for length, _ in rows], budget):
            assert backend.micro([rows[row][1] for row in batch]).finite

    return run


@pytest.fixture
def relative_l2() -> Callable[..., float]:
    """Relative L2 distance of two gradients by name."""

    def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
        return math.sqrt(difference / sum(float(other[name].double().square().sum()) for name in other))

    return distance


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """A domain group whose members were sampled by a version."""

    def make(prompt: int, *, version: int = 1, rewards: list[float] | None = None, attempt: int = 1) -> Group:
        members = tuple(
            Member(
                sample_index=index,
                attempt=attempt,
                body_digest=f"{prompt}-{index}-{attempt}",
                reward=(rewards or [1.0, 0.0, 0.5, 0.0])[index],
                tokens=sequence.tokens,
                trained=sequence.trained,
                engine_log_probs=sequence.engine_log_probs,
                versions=[version] * len(sequence.trained),
            )
            for index, sequence in enumerate(random_sequences(prompt))
        )
        keys = [(prompt, m.sample_index, m.attempt, m.body_digest) for m in members]
        return Group(prompt, members, set_digest(keys))

    return make


@pytest.fixture
def make_settled() -> Callable[..., trainer_pb2.SettledGroup]:
    """See `settled_group`."""
    return settled_group


def settled_group(
    prompt: int,
    *,
    version: common_pb2.PolicyVersion,
    rewards: list[float] | None = None,
    attempt: int = 1,
) -> trainer_pb2.SettledGroup:
    """A settled group as the coordinator sends it."""
    group = trainer_pb2.SettledGroup(prompt_ordinal=prompt)
    for index, sequence in enumerate(random_sequences(prompt)):
        trajectory = settled_trajectory(prompt, index, attempt, sequence, version.number)
        reward = (rewards or [1.0, 0.0, 0.5, 0.0])[index]
        group.members.add(trajectory=trajectory, reward=reward, oldest_version=version)
    return group


def settled_trajectory(
    prompt: int, index: int, attempt: int, sequence: Sequence, number: int
) -> common_pb2.Trajectory:
    """A finished trajectory of given ids."""
    first = sequence.trained[0]
    distribution = common_pb2.SamplingDistribution(
        temperature=1.0, top_p=1.0, repetition_penalty=1.0, log_prob_kind=common_pb2.LOG_PROB_KIND_PROCESSED
    )
    trajectory = common_pb2.Trajectory(
        sample=common_pb2.SampleKey(prompt_ordinal=prompt, sample_index=index),
        attempt=attempt,
        finish_reason=common_pb2.FINISH_REASON_EOS,
    )
    trajectory.segments.add(tokens=common_pb2.TokenSegment(token_ids=sequence.tokens[:first]))
    trajectory.segments.add(
        policy_number=number,
        tokens=common_pb2.TokenSegment(
            token_ids=sequence.tokens[first:], log_probs=sequence.engine_log_probs, distribution=distribution
        ),
    )
    trajectory.body_digest = trajectory_digest(trajectory)
    return trajectory


@pytest.fixture
def settled_digest() -> Callable[..., str]:
    """See `digest_of`."""
    return digest_of


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
        return await self.stub.JoinGang(
            trainer_pb2.JoinGangRequest(
                header=self.header(),
                generation=generation,
                rank=rank,
                world_size=world_size,
                rendezvous=rendezvous,
                timeout=duration_pb2.Duration(seconds=timeout_s),
            )
        )

    async def leave(self, generation: int) -> Any:
        return await self.stub.LeaveGang(
            trainer_pb2.LeaveGangRequest(header=self.header(), generation=generation)
        )

    async def restore(self, checkpoint: str, number: int, source: str = "") -> Any:
        self._number = max(self._number, number)
        return await self.stub.Restore(
            trainer_pb2.RestoreRequest(
                header=self.header(),
                checkpoint=checkpoint,
                number=number,
                store_id="store",
                source_run_directory=source,
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


@pytest.fixture
async def client(tmp_path: Path, make_config: Callable[..., dict[str, Any]]) -> AsyncIterator[TrainerClient]:
    """A trainer on a free port of this process, with a lease, and a client of it."""
    config = InstanceConfig(kind="trainer", shm_dir=tmp_path / "shm", data_dir=tmp_path)
    instance = Instance(config)
    close = await mount(instance)
    address = await instance.start()
    instance.fence.grant(11)
    try:
        async with dial(address, token=None) as channel:
            client = TrainerClient(channel, tmp_path / "run", make_config)
            client.instance = instance
            yield client
    finally:
        await close()
        await instance.stop(1.0)


@pytest.fixture
def trainer_client() -> type[TrainerClient]:
    """The class of `client`, for trainers that a test starts itself."""
    return TrainerClient
