"""A tiny real model, engines and listening instances over it."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_modelkit.weights import below, copy_out, state_tensors, weight_layout
from headrace_rollout.__main__ import mount
from headrace_rollout.endpoint.routes import make_app
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig, Policy, Weights
from headrace_rollout.engines.samples import Group, Prefix, Sample, SlotKey, TrajectoryUpdate
from headrace_rollout.engines.transformers.decoder import Decoder
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from collector import Collector
from conversation_parts import GAME, TALKS, TASK
from endpoint_desk import Desk
from model_weights import weights_of_model
from rollout_calls import HEADER, RUN
from rollout_rig import Published, Rollout
from simulator_rig import SimulatorProcess

TURNS = 8
"""Of a test's loop for each round of decoding: a call over gRPC takes more than ten."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def model_config(tiny_directory) -> ModelSection:
    return ModelSection(path=str(tiny_directory), dtype="float32", max_context=128)


@pytest.fixture(scope="session")
def reference(model_config):
    """The same model as Hugging Face runs it."""
    return load_model(model_config)


@pytest.fixture(scope="session")
def codec(model_config) -> TextCodec:
    return load_tokenizer(model_config)


@pytest.fixture(scope="session")
def weights(reference) -> Weights:
    return weights_of_model(reference)


@pytest.fixture
async def collector() -> Collector:
    return Collector()


@pytest.fixture
def new_collector():
    return Collector


@pytest.fixture
async def in_step(monkeypatch) -> None:
    """An engine's thread begins no round before the test's loop has turned some times: what a test does while answers
    are being made, it does before they have ended, whichever of the two threads a busy machine leaves standing.
    """
    loop, decode = asyncio.get_running_loop(), Decoder._decode

    def turn(times: int, turned: threading.Event) -> None:
        if times:
            loop.call_soon(turn, times - 1, turned)
        else:
            turned.set()

    def behind_the_loop(decoder: Decoder) -> None:
        turned = threading.Event()
        with suppress(RuntimeError):  # The test has ended.
            loop.call_soon_threadsafe(turn, TURNS, turned)
            turned.wait(1.0)
        decode(decoder)

    monkeypatch.setattr(Decoder, "_decode", behind_the_loop)


@pytest.fixture
async def new_engine(in_step, model_config, weights, codec) -> AsyncIterator[Callable]:
    """Builds engines with version 1 installed; closes them at the end."""
    engines: list[Engine] = []

    async def build(max_concurrency: int = 16, *, install: bool = True, **model) -> Engine:
        config = EngineConfig(model_config.model_copy(update=model), codec, max_concurrency)
        engine = ENGINES.choose("transformers", {}).build(config)
        engines.append(engine)
        await engine.place((torch.device("cpu"),), 1)
        if install:
            await engine.install(Policy(1, "one"), weights)
        return engine

    yield build
    for engine in engines:
        await engine.close()


@pytest.fixture
async def engine(new_engine) -> Engine:
    return await new_engine()


@pytest.fixture
def groups(codec) -> list[Group]:
    """Five prompts of different lengths with three samples each."""
    texts = ["7", "copy 123 =", "sort 9 8 7 6 5 4 3 2 1 :", "1 + 2 + 3 =", "a" * 40]
    return [
        Group(ordinal, codec.encode_prompt(text=text), [Sample(index, 1) for index in range(3)])
        for ordinal, text in enumerate(texts)
    ]


@pytest.fixture
def resumed():
    """The group with each sample going on from its partial output."""

    def resume(group: Group, partials: dict[SlotKey, TrajectoryUpdate]) -> Group:
        samples = []
        for sample in group.samples:
            partial = partials[SlotKey(group.prompt_ordinal, sample.sample_index)]
            assert isinstance(partial.whole, Prefix)
            attempt = sample.attempt + 1
            samples.append(replace(sample, attempt=attempt, prefix=partial.whole, cache=partial.cache))
        return replace(group, samples=samples)

    return resume


DATA_TYPES = {
    torch.float32: common_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: common_pb2.DATA_TYPE_BFLOAT16,
    torch.float64: common_pb2.DATA_TYPE_FLOAT64,
    torch.int64: common_pb2.DATA_TYPE_INT64,
}


@pytest.fixture
def shm_root(tmp_path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
async def trainer_store(shm_root) -> AsyncIterator[WeightStore]:
    """A store with a served address, as the trainer has."""
    server = GrpcServer("127.0.0.1:0", token=None)
    store = WeightStore(shm_root, "trainer")
    server.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(store),
        "headrace.common.v1.WeightService",
    )
    store.address = await server.start()
    yield store
    await server.drain(1)
    store.close()


@pytest.fixture
def publish(trainer_store):
    """Publishes a model's weights under a number, with those of other policies by their names."""

    def publish(model, number: int, *, run: str = RUN, **policies) -> Published:
        models = {"": model, **policies}
        layout = [
            (policy, name, dtype, shape)
            for policy, own in models.items()
            for name, dtype, shape in weight_layout(own, torch.float32)
        ]
        wire = [(below(policy, name), DATA_TYPES[dtype], shape) for policy, name, dtype, shape in layout]
        pending = trainer_store.begin(run, number, wire)
        for policy, name, dtype, _ in layout:
            copy_out(models[policy], name, pending.buffer(below(policy, name)), dtype)
        gc.collect()
        version, manifest = pending.seal(number - 1, number - 1)
        return Published(version, manifest, trainer_store.source(run, number))

    return publish


@pytest.fixture
async def new_rollout(in_step, shm_root) -> AsyncIterator[Callable]:
    """Starts instances on free ports; each holds lease 1."""
    started: list[tuple[Instance, grpc.aio.Channel]] = []

    async def start(name: str = "rollout-0", shm_dir: Path = shm_root) -> Rollout:
        config = InstanceConfig(kind="rollout", name=name, shm_dir=shm_dir, devices=("cpu:0",))
        instance = Instance(config)
        await mount(instance)
        address = await instance.start()
        instance.fence.grant(1)
        channel = dial(address, token=None)
        started.append((instance, channel))
        return Rollout(instance, rollout_pb2_grpc.RolloutServiceStub(channel))

    yield start
    for instance, channel in started:
        await channel.close()
        await instance.stop(2.0)


@pytest.fixture
async def rollout(new_rollout, tiny_directory, publish, reference) -> Rollout:
    """An instance with an open run and version 1 installed."""
    rollout = await new_rollout()
    await rollout.open(tiny_directory, max_concurrency=16)
    await rollout.install(publish(reference, 1))
    return rollout


@pytest.fixture
async def rollout_of_text(new_rollout, tiny_directory, publish, reference) -> Rollout:
    """As `rollout`, beside another instance of a test."""
    rollout = await new_rollout("rollout-text")
    await rollout.open(tiny_directory, max_concurrency=16)
    await rollout.install(publish(reference, 2))
    return rollout


@pytest.fixture
def assignments() -> list[rollout_pb2.GroupAssignment]:
    """Four text prompts with three samples each."""
    texts = ["7", "copy 123 =", "sort 9 8 7 :", "1 + 2 ="]
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(text=text),
            samples=[rollout_pb2.SampleAssignment(sample_index=index, attempt=1) for index in range(3)],
        )
        for ordinal, text in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def simulator_process(tmp_path_factory) -> Iterator[SimulatorProcess]:
    """A simulator that many tests share; each opens pools of its own."""
    process = SimulatorProcess(tmp_path_factory.mktemp("simulator"))
    yield process
    process.kill()


@pytest.fixture
def simulator_address(simulator_process) -> str:
    return simulator_process.address


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """An endpoint that is asked without a network."""
    made = Desk()
    transport = httpx.ASGITransport(make_app(made.endpoint))
    async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as made.client:
        yield made


@pytest.fixture
def checkpoint(tmp_path):
    """A trainer's checkpoint of a model: its masters by name."""

    def write(model, name="step-1"):
        directory = tmp_path / name
        directory.mkdir()
        tensors = {key: value.detach().clone() for key, value in state_tensors(model)}
        save_file(tensors, directory / "weights.safetensors")
        return str(directory)

    return write


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("talks")
    (directory / "talks.py").write_text(TALKS)
    (directory / "game.py").write_text(GAME)
    simulator = SimulatorProcess(directory)
    yield simulator.address
    simulator.kill()


@pytest.fixture
def talking(new_rollout, tiny_directory, publish, reference):
    """Opens a run of conversations and installs version 3."""

    async def start(others=None, policies=None, **environment):
        rollout = await new_rollout()
        rollout.model_path = tiny_directory
        config = {
            "policies": policies or {},
            "workflow": "agentic",
            "model": {"path": str(tiny_directory), "dtype": "float32", "max_context": 64},
            "environment": {"backend": "conversation", "tasks": [TASK], **environment},
            "rollout": {"max_concurrency": 16},
            "seed": 7,
        }
        await rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config)))
        await rollout.install(publish(reference, 3, **(others or {})))
        return rollout

    return start
