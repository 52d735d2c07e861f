"""One engine for a module of tests: how it is built, what it was given, and what Hugging Face says of its tokens."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from collector import Collector
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig, Policy, Weights
from headrace_rollout.engines.hosted.engine import HostedEngine
from headrace_rollout.engines.samples import Distribution, Group, Sample, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.engines.transformers.sampling import RowDistributions, process
from headrace_schema.sections.generating import ModelSection
from model_weights import weights_of_model
from plain_backend import build_plain
from transformers import PreTrainedModel

ENGINES_HERE = os.environ.get("ENGINE", "transformers,plain").split(",")
"""The engines to test: those that need no environment of their own, unless ENGINE names another."""
OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {"enforce_eager": True},
    "vllm": {"enforce_eager": True, "kv_cache_gib": 0.25},
}
for _name in OPTIONS:  # such as {"tensor_parallel_size": 2}
    OPTIONS[_name] |= json.loads(os.environ.get("ENGINE_OPTIONS", "{}"))
CONTEXT = 512
START_S = 600.0


def make_model(seed: int, **shape: Any) -> PreTrainedModel:
    """A model that every engine can run (head_dim 32); its logits differ enough for a wrong one to show."""
    model = tiny_model(seed, head_dim=32, num_attention_heads=2, num_key_value_heads=1, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0 if "lm_head" in name else 3.0)
    return model


def write_model(directory: Path, seed: int, **shape: Any) -> PreTrainedModel:
    """Saves the model with its tokenizer."""
    from headrace_modelkit.loading import save_model

    model = make_model(seed, **shape)
    save_model(model, character_tokenizer(), directory)
    return model


def make_rig(name: str, directory: Path, **shape: Any) -> Rig:
    """An engine for a model that is written there, without a version."""
    model_a = write_model(directory, 1, **shape)
    section = ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)
    engine = build(name, section, load_tokenizer(section))
    return Rig(name, section, engine, model_a, make_model(2, **shape))


@dataclass
class Rig:
    """An engine with the models A and B; version numbers rise from test to test."""

    name: str
    model: ModelSection
    engine: Engine
    model_a: PreTrainedModel
    model_b: PreTrainedModel
    number: int = 0

    @property
    def hosted(self) -> bool:
        return isinstance(self.engine, HostedEngine)

    def pids(self) -> list[int]:
        """The engine's own processes; none of one that runs in this process."""
        return list(self.engine._backend.pids) if isinstance(self.engine, HostedEngine) else []

    def weights(self, model: PreTrainedModel) -> Weights:
        return weights_of_model(model)

    async def serves(self, model: PreTrainedModel) -> None:
        """Fails unless what answers is this model."""
        prompt = [3 + index % 20 for index in range(200)]
        output = (await self.generate([group(0, prompt)], Distribution(0.0)))[SlotKey(0, 0)]
        expected = expected_log_probs(model, prompt, list(output.whole.token_ids), Distribution())
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)

    async def install(self, model: PreTrainedModel, **options: bool) -> int:
        self.number += 1
        digest = "a" if model is self.model_a else "b"
        await self.engine.install(Policy(self.number, digest), self.weights(model), **options)
        return self.number

    async def ready(self) -> None:
        """Version A serves, nothing lives."""
        await self.engine.abort(None)
        if self.engine.paused:
            await self.engine.resume()
        if self.engine.policy is None or self.engine.policy.digest != "a":
            await self.install(self.model_a)

    def stream(self, collector: Collector, distribution: Distribution | None = None, **options) -> Stream:
        assert self.engine.policy is not None
        return collector.stream(distribution, **{"policy_number": self.engine.policy.number, **options})

    async def generate(
        self, groups: Sequence[Group], distribution: Distribution | None = None, **options
    ) -> dict[SlotKey, TrajectoryUpdate]:
        collector = Collector()
        await self.engine.submit(self.stream(collector, distribution, **options), groups)
        return await collector.wait_ended(sum(len(group.samples) for group in groups))


def build(
    name: str,
    model: ModelSection,
    codec: TextCodec,
    rows: int = 16,
    options: Mapping[str, Any] | None = None,
    adapters: Mapping[str, int] | None = None,
) -> Engine:
    """An engine, placed on the CPU; `options` go before those of all tests."""
    config = EngineConfig(model, codec, rows, adapters=adapters or {})
    wanted = {**OPTIONS.get(name, {}), **(options or {})}
    chosen = None if name == "plain" else ENGINES.choose(name, wanted)
    engine = build_plain(config) if chosen is None else chosen.build(config)

    async def place() -> None:
        await engine.place((torch.device("cpu"),), 1)

    asyncio.run(place())
    return engine


def group(ordinal: int, ids: Sequence[int], samples: int = 1) -> Group:
    """A group of fresh samples."""
    return Group(ordinal, list(ids), [Sample(index, 1) for index in range(samples)])


def tokens(outputs: dict[SlotKey, TrajectoryUpdate]) -> dict[SlotKey, list[int]]:
    """Whole answers by slot."""
    return {key: list(output.whole.token_ids) for key, output in outputs.items()}


def expected_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], distribution: Distribution
) -> list[float]:
    """Hugging Face's, in fp32, under the processed distribution."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    rows = RowDistributions.of([distribution] * len(answer), logits.device)
    scores = process(logits, rows).log_softmax(-1)
    return scores.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
