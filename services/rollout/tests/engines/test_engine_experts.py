"""Models with experts in every engine: versions by the checkpoint's names, and the routes that tokens took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace_modelkit.families.mixtures import expert_blocks, expert_shape
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_moe
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.samples import Distribution, Group, Sample, SlotKey
from headrace_schema.sections.generating import ModelSection
from rig import CONTEXT, ENGINES_HERE, OPTIONS, Rig, group
from transformers import MixtralConfig, MixtralForCausalLM

PROMPTS = ([3, 4, 5, 6, 7, 8], [9, 10, 11], [12] * 20)
HERE = [name for name in ENGINES_HERE if name not in ("plain", "sglang")]


SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}


def make_qwen3_moe(seed: int):
    return widened(tiny_moe(seed, **SHAPE))


def make_mixtral(seed: int):
    """Its routers' weights are always normed, and a checkpoint names its experts w1, w2 and w3."""
    torch.manual_seed(seed)
    own = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    places = {
        "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return widened(MixtralForCausalLM(MixtralConfig(**own, **places, **SHAPE)).eval())


def widened(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
    return model


FAMILIES = {"qwen3_moe": make_qwen3_moe, "mixtral": make_mixtral}


RIGS = [
    pytest.param(
        (name, family),
        id=f"{name}-{family}",
        marks=() if name == "transformers" else (pytest.mark.nightly,),  # others take long to start
    )
    for name in HERE
    for family in FAMILIES
]


@pytest.fixture(scope="module", params=RIGS)
def rig(request, tmp_path_factory):
    import asyncio

    chosen, family = request.param
    make_moe = FAMILIES[family]
    directory = tmp_path_factory.mktemp("moe")
    model = make_moe(1)
    save_model(model, character_tokenizer(), directory)
    section = ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)
    config = EngineConfig(section, load_tokenizer(section), 16)
    options = OPTIONS.get(chosen, {})
    engine = ENGINES.choose(chosen, options).build(config)
    if engine.capabilities.routed_experts:
        engine = ENGINES.choose(chosen, options).build(replace(config, routed_experts=True))

    async def place() -> None:
        await engine.place((torch.device("cpu"),), 1)

    asyncio.run(place())
    yield Rig(chosen, section, engine, model, make_moe(2))
    asyncio.run(engine.close())


def routes_of(model, ids: list[int]) -> np.ndarray:
    """(tokens, layers, chosen) experts as transformers chooses them, each token's in order."""
    seen = []
    hooks = [
        block.gate.register_forward_hook(lambda _, __, found: seen.append(found[2]))
        for block in expert_blocks(model)
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).sort(-1).values.numpy()


def told(output, model) -> np.ndarray:
    shape = expert_shape(model.config)
    found = np.frombuffer(output.whole.routes, dtype=np.uint8).reshape(-1, shape.layers, shape.chosen)
    return np.sort(found, -1)


async def test_tokens_and_routes_are_hugging_faces_also_after_an_install(rig):
    for model in (rig.model_a, rig.model_b):
        await rig.install(model)
        groups = [group(index, prompt, 2) for index, prompt in enumerate(PROMPTS)]
        for output in (await rig.generate(groups, max_new_tokens=9)).values():
            ids = [*output.prompt_ids, *output.whole.token_ids]
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(output.prompt_ids), len(ids))
            wanted = [float(scores[at - 1, ids[at]]) for at in places]
            assert output.whole.log_probs == pytest.approx(wanted, abs=1e-4)
            if rig.engine.capabilities.routed_experts:
                assert np.array_equal(told(output, model), routes_of(model, ids[:-1])), rig.name


async def test_a_sample_that_goes_on_elsewhere_keeps_the_routes_that_it_has(rig):
    """Whatever weights go on: what was sampled under others was routed by those."""
    if not rig.engine.capabilities.routed_experts:
        pytest.skip("the engine tells no routes on this machine")
    await rig.install(rig.model_a)
    first = (await rig.generate([group(0, PROMPTS[0])], Distribution(0.0), max_new_tokens=4))[SlotKey(0, 0)]
    assert len(first.whole.token_ids) == 4
    await rig.install(rig.model_b)
    resumed = Group(0, PROMPTS[0], [Sample(0, 2, first.whole)])
    second = (await rig.generate([resumed], Distribution(0.0), max_new_tokens=9))[SlotKey(0, 0)]
    before, after = told(first, rig.model_a), told(second, rig.model_a)
    assert len(before) == len(PROMPTS[0]) + 3
    assert len(after) == len(PROMPTS[0]) + len(second.whole.token_ids) - 1
    assert np.array_equal(after[: len(before)], before)
    ids = [*PROMPTS[0], *second.whole.token_ids]
    assert np.array_equal(after[len(before) :], routes_of(rig.model_b, ids[:-1])[len(before) :])


async def test_an_engine_that_is_not_asked_tells_no_routes(tmp_path):
    if "transformers" not in HERE:
        pytest.skip("the engine is chosen by ENGINE, and started for the other tests alone")
    model = make_qwen3_moe(1)
    save_model(model, character_tokenizer(), tmp_path / "moe")
    section = ModelSection(path=str(tmp_path / "moe"), dtype="float32", max_context=CONTEXT)
    config = EngineConfig(section, load_tokenizer(section), 16)
    engine = ENGINES.choose("transformers", {}).build(config)
    await engine.place((torch.device("cpu"),), 1)
    rig = Rig("transformers", section, engine, model, model)
    await rig.install(model)
    found = await rig.generate([group(0, PROMPTS[0])], max_new_tokens=4)
    assert found[SlotKey(0, 0)].whole.routes == b""
    await engine.close()
