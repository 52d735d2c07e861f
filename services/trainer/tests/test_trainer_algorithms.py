"""Advantages, losses and their gradients against verl's own output on one fixed batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace_schema.learning import AlgorithmSection
from headrace_trainer.algorithms import algorithm_names, build_algorithm
from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.algorithms._policy_loss import clipped_objective, truncated_importance
from headrace_trainer.errors import Refusal

VECTORS = json.loads((Path(__file__).parent / "data" / "verl_vectors.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in VECTORS["inputs"].items()}
CASES = {case["key"]: case for case in VECTORS["cases"]}
MASK_BT = INPUTS["response_mask"].bool()
LOSSES = sorted(key for key in CASES if key.startswith(("ppo_", "loss_vanilla")))


@pytest.mark.parametrize(("key", "normalize_std"), [("grpo", True), ("dr_grpo", False)])
def test_advantages_equal_verl(key, normalize_std):
    grpo = build_algorithm(AlgorithmSection(normalize_std=normalize_std))
    advantages_GN = grpo.advantages(INPUTS["seq_reward"].view(2, 4))
    expected_BT = torch.tensor(CASES[key]["outputs"]["advantages"])
    torch.testing.assert_close(advantages_GN.view(8, 1) * MASK_BT, expected_BT)


@pytest.mark.parametrize("key", LOSSES)
def test_loss_and_gradient_equal_verl(key):
    params = CASES[key]["params"]
    mode = params["loss_agg_mode"]
    algorithm = build_algorithm(AlgorithmSection(loss_aggregation=mode))
    log_probs_BT = INPUTS["logp"].clone().requires_grad_()
    loss_K, clipped_K = clipped_objective(
        log_probs_BT[MASK_BT],
        INPUTS["old_logp"][MASK_BT],
        INPUTS["adv"][MASK_BT],
        clip_low=params.get("cliprange_low", params.get("clip_ratio_low")),
        clip_high=params.get("cliprange_high", params.get("clip_ratio_high")),
        dual_clip=params.get("clip_ratio_c"),
    )
    lengths = MASK_BT.sum(dim=1).tolist()
    weights_K = torch.tensor([algorithm.token_weight(n) for n in lengths for _ in range(n)])
    loss = (loss_K * weights_K).sum() / algorithm.denominator(sum(lengths), len(lengths))
    loss.backward()
    expected = {name: torch.tensor(value) for name, value in CASES[key]["outputs"].items()}
    torch.testing.assert_close(loss.detach(), expected["loss"].reshape(()))
    torch.testing.assert_close(log_probs_BT.grad * MASK_BT, expected["grad"])
    if "clipfrac" in expected and mode == "token-mean":
        torch.testing.assert_close(clipped_K.float().mean(), expected["clipfrac"].reshape(()))


def test_strict_single_step_has_ratio_one():
    log_probs_K = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = TokenBatch(log_probs_K, torch.tensor([-1.5, -2.0]), torch.tensor([2.0, -1.0]), torch.ones(2))
    sums = build_algorithm(AlgorithmSection()).loss(batch)
    sums.loss.backward()
    torch.testing.assert_close(log_probs_K.grad, torch.tensor([-2.0, 1.0]))
    assert sums.token_sums["clip_fraction"] == 0


def test_importance_correction_is_capped_detached_and_skips_unknown_tokens():
    log_probs_K = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine_K = torch.tensor([-1.5, -9.0, float("nan")])
    batch = TokenBatch(log_probs_K, engine_K, torch.ones(3), torch.ones(3))
    build_algorithm(AlgorithmSection(importance_cap=2.0)).loss(batch).loss.backward()
    expected_K = -torch.tensor([0.5, 1.0, 0.0]).exp().clamp(max=2.0)
    torch.testing.assert_close(log_probs_K.grad, expected_K)
    weights_K = truncated_importance(log_probs_K, engine_K, 2.0)
    assert not weights_K.requires_grad


def test_equal_rewards_have_exactly_zero_advantage():
    rewards_GN = torch.tensor([[0.1 + 0.2] * 3], dtype=torch.float64)
    assert build_algorithm(AlgorithmSection()).advantages(rewards_GN).tolist() == [[0.0, 0.0, 0.0]]


def test_unknown_algorithm_names_the_nearest():
    assert algorithm_names() == ["grpo"]
    with pytest.raises(Refusal, match="did you mean 'grpo'"):
        build_algorithm(AlgorithmSection(name="grop"))
