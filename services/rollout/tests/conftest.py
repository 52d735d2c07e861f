"""A tiny real model, engines over it, and streams that collect what an engine sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from headrace_modelkit.config import ModelConfig
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_modelkit.weights import copy_out, weight_layout
from headrace_rollout.engines import load_engine
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
    WeightView,
)

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
def model_config(tiny_directory) -> ModelConfig:
    return ModelConfig(path=str(tiny_directory), dtype="float32", max_context=128)


@pytest.fixture(scope="session")
def reference(model_config):
    """The same model as Hugging Face runs it."""
    return load_model(model_config)


@pytest.fixture(scope="session")
def codec(model_config) -> TextCodec:
    return load_tokenizer(model_config)


def _views(model) -> list[WeightView]:
    views = []
    for name, dtype, shape in weight_layout(model, torch.float32):
        data = bytearray(dtype.itemsize * torch.Size(shape).numel())
        copy_out(model, name, memoryview(data), torch.float32)
        views.append(WeightView(name, str(dtype).removeprefix("torch."), shape, memoryview(data)))
    return views


@pytest.fixture(scope="session")
def weight_views(reference) -> list[WeightView]:
    return _views(reference)


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
async def new_engine(model_config, weight_views, codec) -> AsyncIterator[Callable]:
    """Builds engines with version 1 installed; closes them at the end."""
    engines: list[Engine] = []

    async def build(max_concurrency: int = 16, *, install: bool = True, **model) -> Engine:
        config = EngineConfig(model_config.model_copy(update=model), codec, max_concurrency)
        engine = load_engine("transformers")(config)
        engines.append(engine)
        await engine.set_threads(1)
        if install:
            await engine.install(Policy(1, "one"), weight_views)
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
            whole = partials[SampleKey(group.prompt_ordinal, sample.sample_index)].whole
            assert isinstance(whole, Prefix)
            samples.append(replace(sample, attempt=sample.attempt + 1, prefix=whole))
        return replace(group, samples=samples)

    return resume
