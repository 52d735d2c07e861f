"""Families of models in the built-in engine: it samples from the class's own distribution, or refuses the model."""

import pytest
import torch
from headrace_modelkit.presets.families import FAMILIES, write_family
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy, Refused
from headrace_rollout.engines.samples import Distribution
from headrace_schema.sections.generating import ModelSection
from model_weights import weights_of_model

QUICK = ("llama", "hyperclovax", "deepseek_v3", "doge", "afmoe", "nemotron")
CONTEXT = 60
REFUSED = {
    *(
        "deepseek_v32",
        "glm_moe_dsa",
        "deepseek_v4",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
    ),
    *("olmo3", "ministral", "exaone4", "llama4_text", "mimo_v2_flash", "qwen3_5_text", "qwen3_5_moe_text"),
    *(
        "qwen3_next",
        "olmo_hybrid",
        "kimi_linear",
        "nemotron_h",
        "granitemoehybrid",
        "bamba",
        "jamba",
        "falcon_h1",
    ),
    *("recurrent_gemma", "lfm2", "lfm2_moe", "lfm3", "minimax"),
}
"""By their configuration: their layers do more than attend to a context of this length."""


def engine_of(path):
    section = ModelSection(path=str(path), dtype="float32", max_context=CONTEXT)
    return ENGINES.choose("transformers", {}).build(
        EngineConfig(model=section, codec=load_tokenizer(section), max_concurrency=8)
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,))
        for name in FAMILIES
        if name not in REFUSED
    ],
)
async def test_its_log_probs_are_those_of_transformers(family, tmp_path):
    model = write_family(tmp_path / family, family)
    engine = engine_of(tmp_path / family)
    await engine.install(Policy(1, "one"), weights_of_model(model))
    ids = torch.randint(3, 32, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    [found], _ = await engine.score([(ids, 4)], Distribution())
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(rows[at - 1, ids[at]]) for at in range(4, 20)]
    assert found == pytest.approx(expected, abs=1e-4)
    await engine.close()


@pytest.mark.parametrize(
    ("family", "keys"), [("qwen3", {"logit_scale": 0.25}), ("llama", {"logits_scaling": 3.0})]
)
async def test_a_head_that_is_not_the_classes_own_is_refused_by_name(family, keys, tmp_path):
    model = write_family(tmp_path / family, family, **keys)
    engine = engine_of(tmp_path / family)
    with pytest.raises(Refused, match=r"model.path: .* would be computed wrong by rollout.engine") as caught:
        await engine.install(Policy(1, "one"), weights_of_model(model))
    assert caught.value.reason == "INVALID" and family in str(caught.value) and engine.policy is None
    await engine.close()
