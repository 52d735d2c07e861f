"""Experts in fsdp: expert parallel is the same training as one rank's, forward, gradients, commits and checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, write_tiny_moe
from transformers import MixtralConfig, MixtralForCausalLM

pytestmark = pytest.mark.timeout(400)
GRADIENT_L2, WEIGHTS_L2 = 1e-5, 1e-5
EXPERTS_2, EXPERTS_4 = {"expert_parallel": 2}, {"expert_parallel": 4}
CASES = {
    "two": (2, "qwen3_moe", EXPERTS_2),
    "two-resharded": (2, "mixtral", {**EXPERTS_2, "shard": "weights"}),
    "data": (2, "qwen3_moe", {}),
    "routed": (2, "qwen3_moe", EXPERTS_2),
    "four-by-two": (4, "qwen3_moe", EXPERTS_2),
    "four": (4, "mixtral", EXPERTS_4),
}
"""Name → ranks, model, options."""
ROUTED = {"routed": "qwen3_moe-routed"}
"""The case that replays routes beside a load-balance loss, and what it is compared with."""
NAMES = [pytest.param(name, marks=() if name in ROUTED else (pytest.mark.nightly,)) for name in CASES]
"""One case for every change, which has most in it: each is a group of processes."""
RECOMPUTED = "two-resharded"
MODELS = ("qwen3_moe", "mixtral")


def alone(name: str) -> str:
    """The case of one rank that a case is compared with."""
    return ROUTED.get(name, CASES[name][1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, Path]:
    write_tiny_moe(folder / "qwen3_moe", initializer_range=0.2)
    torch.manual_seed(3)
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 48, "num_local_experts": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixtral = MixtralForCausalLM(
        MixtralConfig(**shape, **heads, max_position_embeddings=512, initializer_range=0.2)
    )
    save_model(mixtral, character_tokenizer(), folder / "mixtral")
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def chosen(request) -> set[str]:
    """The cases that the chosen tests need."""
    named = [item for item in request.session.items if item.path == request.path]
    found = {item.callspec.params["name"] for item in named if hasattr(item, "callspec")}
    return found | ({"two", "four"} if any("of_divided_experts" in item.name for item in named) else set())


@pytest.fixture(scope="module")
def expected(folder, models, chosen) -> dict[str, SimpleNamespace]:
    """One rank's, which has all experts."""
    wanted = sorted({alone(name) for name in chosen})
    configs = {
        name: config(models[name.partition("-")[0]], routed=name in ROUTED.values()) for name in wanted
    }
    found = walk_cases(folder, 1, {name: {"config": own, "saved": ""} for name, own in configs.items()})
    cases = {f"{name}-on": {"config": own, "saved": found[name].file} for name, own in configs.items()}
    for name, resumed in walk_cases(folder, 1, cases).items():
        found[name.removesuffix("-on")].third = part(resumed.tensors, "third")
    return found


@pytest.fixture(scope="module")
def walked(folder, models, expected, chosen) -> dict[str, SimpleNamespace]:
    """The chosen cases, in as few groups of processes as there are numbers of ranks."""
    found = {}
    for ranks in sorted({CASES[name][0] for name in chosen}):
        cases = {
            name: {
                "config": config(
                    models[model],
                    ranks,
                    options,
                    backend="fsdp",
                    routed=name in ROUTED,
                    gradient_checkpointing=name == RECOMPUTED,
                ),
                "saved": expected[alone(name)].file,
            }
            for name, (own, model, options) in CASES.items()
            if own == ranks and name in chosen
        }
        found |= walk_cases(folder, ranks, cases)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradient_log_probs_and_two_commits_are_one_ranks(name, walked, expected, relative_l2):
    found, one = walked[name], expected[alone(name)]
    gradient = part(one.tensors, "gradient")
    assert part(found.tensors, "gradient").keys() == gradient.keys()
    for weight, value in gradient.items():
        own = {weight: found.tensors[f"gradient/{weight}"]}
        assert relative_l2(own, {weight: value}) < 10 * GRADIENT_L2, weight
        assert bool(value.any()), f"{weight} learns"
    for shares, [whole] in zip(found.log_probs, one.log_probs, strict=False):
        in_order = [None] * len(whole)
        for replica, share in enumerate(shares):
            in_order[replica :: len(shares)] = share
        for own, reference in zip(in_order, whole, strict=True):
            assert own[0] == pytest.approx(reference[0], abs=1e-4)
    assert found.norms[:2] == pytest.approx(one.norms[:2], rel=1e-4)
    assert relative_l2(part(found.tensors, "weights"), part(one.tensors, "weights")) < WEIGHTS_L2
    assert relative_l2(part(found.tensors, "moments"), part(one.tensors, "moments")) < 1e-4
    for own, reference in zip(found.sums[:2], one.sums[:2], strict=True):
        assert own == pytest.approx(reference, rel=1e-3, abs=1e-4)
    if name in ROUTED:
        assert one.sums[0]["routes_changed"] > 0.5 * one.sums[0]["routes"] > 0, "at random"
        assert one.sums[0]["balance_loss"] > 1.0
    assert found.layout == one.layout and found.initial == one.initial
    assert found.held and found.refused


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_another_expert_parallel_size_is_taken_up_to_the_last_bit(
    name, walked, expected, relative_l2
):
    assert walked[name].resumed
    third = part(walked[name].tensors, "third")
    assert relative_l2(third, expected[alone(name)].third) < WEIGHTS_L2


@pytest.mark.nightly
def test_one_rank_takes_a_checkpoint_of_divided_experts(folder, walked, models, expected, relative_l2):
    cases = {
        f"back-{name}": {"config": config(models[CASES[name][1]]), "saved": walked[name].file}
        for name in ("two", "four")
    }
    for name, back in walk_cases(folder, 1, cases).items():
        model = CASES[name.removeprefix("back-")][1]
        assert back.resumed
        assert relative_l2(part(back.tensors, "third"), expected[model].third) < WEIGHTS_L2
