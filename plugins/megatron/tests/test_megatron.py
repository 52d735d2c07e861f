"""The megatron backend is the fsdp backend in other layouts: gradients, commits, checkpoints, refusals.

Runs where megatron-core is: `make test-megatron`. Each layout is a group of processes; see `backend_ranks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, write_tiny, write_tiny_moe
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
    ),
]
TENSOR, PIPELINE, EXPERTS = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"expert_parallel": 2}
VIRTUAL = {**PIPELINE, "virtual_stages": 2}
CASES = {
    "alone": (1, "qwen3", {}),
    "tensor": (2, "qwen3", TENSOR),
    "sequence": (2, "qwen3", {**TENSOR, "sequence_parallel": True}),
    "pipeline": (2, "qwen3", PIPELINE),
    "data": (2, "qwen3", {}),
    "context": (2, "qwen3", {"context_parallel": 2}),
    "tensor-tied": (2, "llama", TENSOR),
    "pipeline-tied": (2, "llama", PIPELINE),
    "tensor-biased": (2, "qwen2", TENSOR),
    "pipeline-one-part": (2, "llama", {**PIPELINE, "pipeline_micro_batches": 1}),
    "virtual": (2, "deep", VIRTUAL),
    "virtual-uneven": (2, "deep", {**VIRTUAL, "pipeline_micro_batches": 3}),
    "stages": (4, "deep", {"pipeline_parallel": 4}),
    "tensor-pipeline": (4, "llama", {**TENSOR, **PIPELINE}),
    "tensor-data": (4, "qwen3", TENSOR),
    "experts": (2, "qwen3_moe", EXPERTS),
    "routed": (2, "qwen3_moe", EXPERTS),
    "routed-context": (2, "qwen3_moe", {**EXPERTS, "context_parallel": 2}),
    "routed-tensor": (4, "qwen3_moe", {**EXPERTS, **TENSOR}),
    "routed-pipeline": (4, "qwen3_moe", {**EXPERTS, **PIPELINE}),
    "experts-context": (2, "qwen3_moe", {**EXPERTS, "context_parallel": 2}),
    "experts-tensor": (4, "mixtral", {**EXPERTS, **TENSOR}),
    "experts-sequence": (4, "qwen3_moe", {**EXPERTS, **TENSOR, "sequence_parallel": True}),
    "experts-pipeline": (4, "qwen3_moe", {**EXPERTS, **PIPELINE}),
    "virtual-tensor-sequence": (4, "deep", {**VIRTUAL, **TENSOR, "sequence_parallel": True}),
    "virtual-context": (4, "deep", {**VIRTUAL, "context_parallel": 2}),
    "virtual-data": (4, "deep", VIRTUAL),
}
"""Name → ranks, model, options."""
NIGHTLY = [
    name for name in CASES if name.startswith(("experts", "routed-", "virtual-", "stages", "pipeline-one"))
]
ROUTED = [name for name in CASES if name.startswith("routed")]
"""The cases that replay routes beside a load-balance loss."""
ALONE = {name: model + ("-routed" if name in ROUTED else "") for name, (_, model, _) in CASES.items()}
"""What a case is compared with: the fsdp backend on one rank."""
RECOMPUTED = ("sequence", "experts-pipeline", "virtual-data")
"""The cases that recompute layers in the backward pass."""
MODELS = ("qwen3", "llama", "deep", "qwen2", "qwen3_moe", "mixtral")
GRADIENT_L2, WEIGHTS_L2 = 1e-5, 1e-5
"""Relative. After commits Adam has divided noise by noise in some weights, which then differ by up to the rate."""


def marked(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters, of which the `quick` ones run with every change and the others each night."""
    return [pytest.param(name, marks=() if name in quick else (pytest.mark.nightly,)) for name in names]


NAMES = marked(CASES, CASES.keys() - NIGHTLY)
ALL_ALONE = marked(dict.fromkeys(ALONE.values()), {ALONE[name] for name in CASES.keys() - NIGHTLY})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Tiny models of three families: apart and tied heads, with and without biases."""
    folder = tmp_path_factory.mktemp("families")
    write_tiny(folder / "qwen3")
    write_tiny_moe(folder / "qwen3_moe", initializer_range=0.2)
    shape = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    torch.manual_seed(3)
    llama = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=scaled))
    qwen2 = Qwen2ForCausalLM(Qwen2Config(**shape))
    deep = LlamaForCausalLM(LlamaConfig(**shape | {"num_hidden_layers": 4}))
    for name, model in (("llama", llama), ("qwen2", qwen2), ("deep", deep)):
        for parameter in model.parameters():  # biases and norms too: those of a new model are 0 and 1
            parameter.data += 0.02 * torch.randn_like(parameter)
        save_model(model, character_tokenizer(), folder / name)
    shape |= {"intermediate_size": 48, "num_local_experts": 4, "initializer_range": 0.2}
    mixtral = MixtralForCausalLM(MixtralConfig(**{**shape, "tie_word_embeddings": False}))
    save_model(mixtral, character_tokenizer(), folder / "mixtral")
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def run_cases(models, tmp_path_factory):
    """Walks through cases with so many processes; figures and tensors by case."""
    folder = tmp_path_factory.mktemp("cases")

    def run(ranks: int, cases: dict[str, dict]) -> dict[str, SimpleNamespace]:
        return walk_cases(folder, ranks, cases)

    return run


@pytest.fixture(scope="module")
def chosen(request) -> set[str]:
    """The cases of the chosen tests, and those that stand alone."""
    named = [item for item in request.session.items if item.path == request.path]
    found = {item.callspec.params.get("name") for item in named if hasattr(item, "callspec")}
    return found | {"tensor", "tensor-pipeline"}


@pytest.fixture(scope="module")
def expected(run_cases, models, chosen):
    """The fsdp backend's, on one rank, by model; with routes apart."""
    wanted = {ALONE.get(name, name) for name in chosen if name}
    configs = {
        name: config(models[name.removesuffix("-routed")], routed=name.endswith("-routed"))
        for name in dict.fromkeys(ALONE.values())
        if name in wanted
    }
    found = run_cases(1, {name: {"config": own, "saved": ""} for name, own in configs.items()})
    cases = {f"{name}-on": {"config": own, "saved": found[name].file} for name, own in configs.items()}
    for name, resumed in run_cases(1, cases).items():
        found[name.removesuffix("-on")].third = part(resumed.tensors, "third")
    return found


@pytest.fixture(scope="module")
def walked(run_cases, models, expected, chosen):
    """The cases of the chosen tests, in as few groups of processes as there are numbers of ranks."""
    found = {}
    for ranks in sorted({CASES[name][0] for name in chosen & CASES.keys()}):
        cases = {
            name: {
                "config": config(
                    models[model],
                    ranks,
                    options,
                    routed=name in ROUTED,
                    gradient_checkpointing=name in RECOMPUTED,
                ),
                "saved": expected[ALONE[name]].file,
            }
            for name, (own, model, options) in CASES.items()
            if own == ranks and name in chosen
        }
        found |= run_cases(ranks, cases)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_before_clipping_is_the_fsdp_backends(name, walked, expected, relative_l2):
    found, fsdp = walked[name], expected[ALONE[name]]
    gradient = part(fsdp.tensors, "gradient")
    assert part(found.tensors, "gradient").keys() == gradient.keys()
    assert relative_l2(part(found.tensors, "gradient"), gradient) < GRADIENT_L2
    worst = max(
        relative_l2({weight: found.tensors[f"gradient/{weight}"]}, {weight: value})
        for weight, value in gradient.items()
    )
    assert worst < 10 * GRADIENT_L2, "of each weight by itself"


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_norms_and_figures_are_the_fsdp_backends(name, walked, expected):
    found, fsdp = walked[name], expected[ALONE[name]]
    for shares, [whole] in zip(found.log_probs, fsdp.log_probs, strict=False):
        in_order = [None] * len(whole)
        for replica, share in enumerate(shares):
            in_order[replica :: len(shares)] = share
        for own, reference in zip(in_order, whole, strict=True):
            assert own[0] == pytest.approx(reference[0], abs=1e-4)
    assert found.norms[:2] == pytest.approx(fsdp.norms[:2], rel=1e-4)
    for own, reference in zip(found.sums[:2], fsdp.sums[:2], strict=True):
        assert own.keys() == reference.keys()
        for figure, value in reference.items():
            assert own[figure] == pytest.approx(value, rel=1e-3, abs=1e-4), figure


@pytest.mark.parametrize("name", NAMES)
def test_two_commits_give_the_weights_and_moments_of_the_fsdp_backend(name, walked, expected, relative_l2):
    found, fsdp = walked[name].tensors, expected[ALONE[name]].tensors
    assert relative_l2(part(found, "weights"), part(fsdp, "weights")) < WEIGHTS_L2
    assert relative_l2(part(found, "moments"), part(fsdp, "moments")) < 1e-4
    assert all(value.isfinite().all() for value in part(found, "weights").values())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_another_layout_is_taken_up_to_the_last_bit(name, walked, expected, relative_l2):
    found, fsdp = walked[name], expected[ALONE[name]]
    assert found.resumed
    assert relative_l2(part(found.tensors, "third"), fsdp.third) < WEIGHTS_L2
    assert found.norms[-1] == pytest.approx(fsdp.norms[2], rel=1e-4)


KEPT = {
    "alone": [1],
    "pipeline": [2, 1],
    "pipeline-one-part": [1, 1],
    "virtual": [5, 3],
    "tensor-pipeline": [2, 2, 1, 1],
    "stages": [4, 3, 2, 1],
}
"""Of eight rows by rank: as many parts as there are stages from this one on, or chunks, and never all of them."""


@pytest.mark.parametrize("name", marked(KEPT, KEPT.keys() - NIGHTLY))
def test_a_stage_keeps_the_activations_of_as_many_parts_as_stages_follow(name, walked):
    assert walked[name].kept == KEPT[name]


def test_the_fsdp_backend_takes_a_checkpoint_of_megatron(run_cases, walked, models, expected, relative_l2):
    cases = {
        f"back-{name}": {"config": config(models[CASES[name][1]]), "saved": walked[name].file}
        for name in ("tensor", "tensor-pipeline")
    }
    for name, back in run_cases(1, cases).items():
        model = CASES[name.removeprefix("back-")][1]
        assert back.resumed
        assert relative_l2(part(back.tensors, "third"), expected[model].third) < WEIGHTS_L2


@pytest.mark.parametrize("name", NAMES)
def test_hold_brings_weights_and_moments_back_and_what_is_not_finite_leaves_nothing(name, walked):
    assert walked[name].held
    assert walked[name].refused


@pytest.mark.parametrize("name", ALL_ALONE)
def test_the_fsdp_backend_keeps_the_same_promises(name, expected):
    assert expected[name].held
    assert expected[name].refused


def test_bf16_differs_from_fsdp_by_rounding_and_keeps_fp32_masters(run_cases, models, relative_l2):
    given = {"model": models["llama"], "dtype": "bfloat16"}
    [fsdp] = run_cases(1, {"bf16": {"config": config(**given), "saved": ""}}).values()
    options = {"tensor-bf16": TENSOR, "data-bf16": {}, "pipeline-bf16": PIPELINE}
    cases = {
        name: {"config": config(**given, ranks=2, options=chosen), "saved": fsdp.file}
        for name, chosen in options.items()
    }
    walked = run_cases(2, cases)
    for found in walked.values():
        assert relative_l2(part(found.tensors, "gradient"), part(fsdp.tensors, "gradient")) < 2e-2
        assert found.resumed and found.held and found.refused
        assert found.layout == fsdp.layout and {entry[1] for entry in found.layout} == {"bfloat16"}
        assert all(value.dtype is torch.float32 for value in part(found.tensors, "weights").values())
    # The leader of replicas is sent nothing, of two halves the other one, in bf16.
    divided = sum(2 * math.prod(shape) for _, _, shape in fsdp.layout if len(shape) > 1)
    assert walked["data-bf16"].received == 0 and walked["tensor-bf16"].received == divided // 2
    assert 0 < walked["pipeline-bf16"].received < divided


@pytest.mark.parametrize("name", NAMES)
def test_what_is_published_has_the_names_types_and_order_of_the_fsdp_backend(name, walked, expected):
    found, fsdp = walked[name], expected[ALONE[name]]
    assert found.layout == fsdp.layout
    assert found.initial == fsdp.initial == [entry[0] for entry in found.layout]
