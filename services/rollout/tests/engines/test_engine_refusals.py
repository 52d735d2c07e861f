"""What a real engine cannot do is a sentence with the key to change, and no hang."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy, Refused
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.registry import PluginError
from model_weights import weights_of_model
from rig import CONTEXT, ENGINES_HERE, OPTIONS, START_S, build, make_model
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, PreTrainedModel

pytestmark = pytest.mark.timeout(START_S)

REAL = [name for name in ENGINES_HERE if name in OPTIONS]
VLLM = [name for name in REAL if name == "vllm"]


def section(directory: Path, model: PreTrainedModel) -> ModelSection:
    save_model(model, character_tokenizer(), directory)
    return ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)


async def refusal(name: str, described: ModelSection, model: PreTrainedModel, **options: Any) -> Refused:
    engine = await asyncio.to_thread(build, name, described, load_tokenizer(described), **options)
    try:
        with pytest.raises(Refused) as refused:
            await engine.install(Policy(1, "a"), weights_of_model(model))
    finally:
        await engine.close()
    return refused.value


@pytest.mark.parametrize("name", REAL)
def test_an_argument_that_the_engine_does_not_know_is_named(name, tmp_path):
    described = section(tmp_path, make_model(1))
    config = EngineConfig(described, load_tokenizer(described), 4)
    chosen = ENGINES.choose(name, {"engine_args": {"quantisation": "fp8"}})
    with pytest.raises(PluginError, match=r"engine_options\.engine_args\.quantisation.*'quantization'"):
        chosen.build(config)


@pytest.mark.nightly  # a start of the engine
@pytest.mark.parametrize("name", VLLM)
async def test_a_cache_that_holds_no_whole_sequence_names_what_to_raise(name, tmp_path):
    options = {"kv_cache_gib": 1e-5}
    refused = await refusal(name, section(tmp_path, make_model(1)), make_model(1), options=options)
    assert refused.reason == "ENGINE_FAILED" and "No available memory for the cache blocks" in str(refused)
    assert "raise rollout.engine_options.kv_cache_gib" in str(refused) and "model.max_context" in str(refused)


@pytest.mark.skipif(not VLLM, reason="of vLLM's log")
def test_a_worker_without_memory_is_heard_through_the_log():
    from headrace_rollout.engines.vllm.arguments import logged_errors, start_failed

    with logged_errors() as logged:
        logged.file.write_text(
            "\x1eHermes tool parser: ValueError: no such tool\n\x1eEngineCore encountered a fatal error.\n"
            "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n"
        )
        said = logged.out_of_memory()
        assert said == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert "lower rollout.engine_options.gpu_memory_utilization" in start_failed(RuntimeError(), said)


@pytest.mark.parametrize("name", VLLM)
async def test_a_model_that_the_engine_has_no_class_for_is_named(name, tmp_path):
    shape = OpenAIGPTConfig(
        vocab_size=32, n_positions=CONTEXT, n_embd=64, n_layer=1, n_head=2, eos_token_id=1
    )
    model = OpenAIGPTLMHeadModel(shape).eval()
    refused = await refusal(name, section(tmp_path, model), model)
    assert refused.reason == "ENGINE_FAILED" and f"{name} did not start" in str(refused)
    assert "OpenAIGPTLMHeadModel" in str(refused)
