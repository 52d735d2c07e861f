"""A tiny real model, engines and listening instances over it, and streams that collect what they send."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_modelkit.weights import copy_out, weight_layout
from headrace_rollout.__main__ import mount
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import (
    Distribution,
    Engine,
    EngineConfig,
    Group,
    Output,
    Policy,
    Prefix,
    Sample,
    SampleKey,
    Stream,
    Weights,
)
from headrace_rollout.service import RolloutServicer
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights import WeightServicer, WeightStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

from episode_rig import SimulatorProcess
from model_weights import weights_of_model
from rollout_calls import HEADER, RUN

WAIT_S = 30.0


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


@dataclass
class Collector:
    """What came back on one stream, by slot."""

    outputs: list[Output] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def sink(self, outputs: list[Output]) -> None:
        self.loop.call_soon_threadsafe(self._take, outputs)

    def failed(self, reason: str) -> None:
        self.loop.call_soon_threadsafe(self._fail, reason)

    def stream(self, distribution: Distribution | None = None, **options) -> Stream:
        defaults = {"policy_number": 1, "max_new_tokens": 24, "seed": 7}
        return Stream(
            distribution=distribution or Distribution(),
            sink=self.sink,
            failed=self.failed,
            **{**defaults, **options},
        )

    def ended(self) -> dict[SampleKey, Output]:
        return {output.key: output for output in self.outputs if output.whole is not None}

    async def wait(self, condition: Callable[[Collector], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                assert not self.failures, self.failures
                self.changed.clear()
                await self.changed.wait()

    async def wait_ended(self, count: int) -> dict[SampleKey, Output]:
        await self.wait(lambda self: len(self.ended()) >= count)
        return self.ended()

    def _take(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        self.changed.set()

    def _fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.changed.set()


@pytest.fixture
async def collector() -> Collector:
    return Collector()


@pytest.fixture
def new_collector():
    return Collector


@pytest.fixture
async def new_engine(model_config, weights, codec) -> AsyncIterator[Callable]:
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

    def resume(group: Group, partials: dict[SampleKey, Output]) -> Group:
        samples = []
        for sample in group.samples:
            partial = partials[SampleKey(group.prompt_ordinal, sample.sample_index)]
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


@dataclass
class Rollout:
    """A rollout instance that listens, and a stub to it."""

    instance: Instance
    stub: rollout_pb2_grpc.RolloutServiceStub
    model_path: Path = Path()
    last: Published | None = None

    @property
    def servicer(self) -> RolloutServicer:
        return self.instance.on_grant.__self__

    async def open(self, model_path, **rollout):
        self.model_path = model_path
        model = {"path": str(model_path), "dtype": "float32", "max_context": 128}
        config = json.dumps({"model": model, "rollout": rollout, "seed": 7})
        return await self.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=config))

    async def install(self, published: Published, *, in_flight: bool = False):
        self.last = published
        return await self.stub.InstallPolicy(
            rollout_pb2.InstallPolicyRequest(
                header=HEADER,
                version=published.version,
                manifest=published.manifest,
                sources=[published.source],
                in_flight=in_flight,
            )
        )

    async def reopen(self, **rollout) -> None:
        """Opens the run again after a close, with the weights of the last install."""
        assert self.last is not None
        await self.open(self.model_path, **rollout)
        await self.install(self.last)

    @property
    def engine(self) -> Engine:
        return self.servicer._run.engine

    def decoding(self) -> tuple[int, set[int]]:
        """Threads and cores of the decoding thread, as that thread sees them."""
        look = self.engine._executor.submit(lambda: (torch.get_num_threads(), os.sched_getaffinity(0)))
        return look.result(WAIT_S)

    def generate(self, groups, *, half_close=True, **options) -> GenerateCall:
        return GenerateCall(self.stub, groups, half_close, options)


class GenerateCall:
    """A Generate stream; `responses` collects, `assign` and `close` write."""

    def __init__(self, stub, groups, half_close, options):
        self.call = stub.Generate()
        self.chunks, self.partials, self.prefills, self.revoked = [], [], [], False
        self.stages, self.lost = [], []
        fields = {"policy_number": 1, "max_new_tokens": 24, "seed": 7, **options}
        distribution = common_pb2.SamplingDistribution(temperature=fields.pop("temperature", 1.0))
        self._opening = rollout_pb2.GenerateOpen(header=HEADER, distribution=distribution, **fields)
        self._groups, self._half_close = groups, half_close

    async def start(self) -> GenerateCall:
        # A refused opening may end the call before the rest is written: who reads it is told why.
        with suppress(grpc.aio.AioRpcError):
            await self.call.write(rollout_pb2.GenerateRequest(open=self._opening))
            if self._groups:
                await self.assign(self._groups)
            if self._half_close:
                await self.call.done_writing()
        return self

    async def assign(self, groups) -> None:
        await self.call.write(rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups(groups=groups)))

    async def reauthorize(self, epoch: int) -> None:
        header = common_pb2.CommandHeader(run=RUN, coordinator_epoch=1, lease_epoch=epoch)
        message = rollout_pb2.Reauthorize(header=header)
        await self.call.write(rollout_pb2.GenerateRequest(reauthorize=message))

    async def read_until(self, condition) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition(self):
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    return
                self.chunks += response.chunks
                self.partials += response.partials
                self.prefills += response.prefills
                self.stages.append({each.stage: each.wall_time.ToNanoseconds() for each in response.stages})
                self.lost += response.lost_repliers
                assert not self.revoked, "a revoked stream has ended"
                self.revoked = response.revoked

    async def read_all(self) -> dict[tuple[int, int], common_pb2.Trajectory]:
        await self.read_until(lambda _: False)
        return self.finished()

    def finished(self) -> dict[tuple[int, int], common_pb2.Trajectory]:
        return {
            (chunk.sample.prompt_ordinal, chunk.sample.sample_index): chunk.finished
            for chunk in self.chunks
            if chunk.HasField("finished")
        }


@dataclass
class Published:
    """A version as a trainer publishes it."""

    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    source: common_pb2.WeightSource


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
    """Publishes a model's weights under a number."""

    def publish(model, number: int, *, run: str = RUN) -> Published:
        layout = weight_layout(model, torch.float32)
        wire = [(name, DATA_TYPES[dtype], shape) for name, dtype, shape in layout]
        pending = trainer_store.begin(run, number, wire)
        for name, dtype, _ in layout:
            copy_out(model, name, pending.buffer(name), dtype)
        gc.collect()
        version, manifest = pending.seal(number - 1, number - 1)
        return Published(version, manifest, trainer_store.source(run, number))

    return publish


@pytest.fixture
async def new_rollout(shm_root) -> AsyncIterator[Callable]:
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
