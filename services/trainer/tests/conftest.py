"""Fixtures of the trainer's tests: a tiny model, a trainer group of one, backends, groups and trajectories."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.weights import load_weights
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.digests import set_digest
from headrace_trainer.__main__ import mount
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.planning import plan_batches, plan_rows
from headrace_trainer.learning.samples import Group, Sample, Trajectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer_calls import TORCH_TYPES, TrainerClient, digest_of, random_sequences, settled_group


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

    def score(weights: Any, sequences: list[Sample], *, temperatures: bool = False) -> list[list[float]]:
        """At temperature 1, or with `temperatures` at those of each token."""
        load_weights(model, dict(weights))
        with torch.no_grad():
            rows = [model(torch.tensor([s.tokens])).logits[0] for s in sequences]
        divisors = [(temperatures and s.temperatures) or [1.0] * len(s.trained) for s in sequences]
        return [
            [
                float((row[position - 1] / divisor).log_softmax(-1)[s.tokens[position]])
                for position, divisor in zip(s.trained, own, strict=True)
            ]
            for row, s, own in zip(rows, sequences, divisors, strict=True)
        ]

    return score


@pytest.fixture
def trainer_group() -> Iterator[TrainerGroup]:
    """A trainer group of one in this process."""
    trainer_group = join_trainer_group(1, 0, 1, "", 10.0, torch.device("cpu"))
    yield trainer_group
    trainer_group.leave()


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
def make_backend(
    trainer_group: TrainerGroup, make_config: Callable[..., dict[str, Any]]
) -> Callable[..., FsdpBackend]:
    """Builds a backend with the initial model loaded."""

    def make(**sections: Any) -> FsdpBackend:
        config = TrainerConfig.model_validate(make_config(**sections))
        backend = build_backend(config, build_algorithm(config.algorithm), trainer_group)
        assert isinstance(backend, FsdpBackend)
        backend.load_initial()
        return backend

    return make


@pytest.fixture
def sequences() -> Callable[..., list[Sample]]:
    """Makes random sequences."""
    return random_sequences


@pytest.fixture
def accumulate() -> Callable[..., None]:
    """Learns groups of sequences through micro-batches of a budget, the groups in the given order."""

    def run(backend: FsdpBackend, groups: list[list[Sample]], budget: int, *, shared: bool = True) -> None:
        rows = [
            (length, [group[index] for index in members])
            for group in groups
            for length, members in plan_rows(group, budget, shared=shared)
        ]
        for batch in plan_batches([length for length, _ in rows], budget):
            assert backend.micro([rows[row][1] for row in batch])

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
            Trajectory(
                sample_index=index,
                attempt=attempt,
                body_digest=f"{prompt}-{index}-{attempt}",
                reward=(rewards or [1.0, 0.0, 0.5, 0.0])[index],
                samples=(
                    Sample(
                        sequence.tokens,
                        sequence.trained,
                        sequence.engine_log_probs,
                        versions=[version] * len(sequence.trained),
                    ),
                ),
            )
            for index, sequence in enumerate(random_sequences(prompt))
        )
        keys = [(prompt, m.sample_index, m.attempt, m.body_digest) for m in members]
        return Group(prompt, members, set_digest(keys))

    return make


@pytest.fixture
def make_settled() -> Callable[..., trainer_pb2.SettledGroup]:
    """Makes a settled group."""
    return settled_group


@pytest.fixture
def settled_digest() -> Callable[..., str]:
    """Makes the digest of a settled group."""
    return digest_of


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
        torch.set_flush_denormal(False)  # A process of its own would end here; other tests want every number.


@pytest.fixture
def trainer_client() -> type[TrainerClient]:
    """The class of `client`, for trainers that a test starts itself."""
    return TrainerClient


@pytest.fixture
async def saved(client: TrainerClient, make_config: Callable[..., dict[str, Any]]) -> TrainerClient:
    """A trainer whose run has two checkpoints; deterministic, so that weights do not hang on what arrives together."""
    version = (await client.open(make_config(deterministic=True))).version
    for _ in range(2):
        version = await client.train(version, 1)
        await client.save(version.number, ledger=b"ledger of %d" % version.number)
    client.held = version
    return client
