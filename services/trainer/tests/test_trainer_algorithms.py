"""Advantages against verl's own output on one fixed batch; losses and gradients against their definition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace_schema.learning import AlgorithmSection
from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm
from headrace_trainer.algorithms._base import Barrier, LossSums, TokenBatch
from headrace_trainer.algorithms._policy_loss import truncated_importance
from headrace_trainer.algorithms.contract import check_algorithm
from headrace_trainer.algorithms.grpo import Grpo
from headrace_trainer.algorithms.plugins import GrpoOptions
from headrace_trainer.errors import Refusal

VECTORS = json.loads((Path(__file__).parent / "data" / "verl_vectors.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in VECTORS["inputs"].items()}
CASES = {case["key"]: case for case in VECTORS["cases"]}
MASK_BT = INPUTS["response_mask"].bool()


@pytest.mark.parametrize(("key", "normalize_std"), [("grpo", True), ("dr_grpo", False)])
def test_advantages_equal_verl(key, normalize_std):
    grpo = build_algorithm(AlgorithmSection(options={"normalize_std": normalize_std}))
    advantages_GN = grpo.advantages(INPUTS["seq_reward"].view(2, 4))
    expected_BT = torch.tensor(CASES[key]["outputs"]["advantages"])
    torch.testing.assert_close(advantages_GN.view(8, 1) * MASK_BT, expected_BT)


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
    ],
)
def test_a_token_s_share_of_the_gradient_is_that_of_its_aggregation(mode, shares):
    algorithm = build_algorithm(AlgorithmSection(options={"loss_aggregation": mode}))
    lengths = [3, 1]
    log_probs_K = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    advantages_K = torch.tensor([2.0, 2.0, 2.0, -1.0])
    weights_K = torch.tensor([algorithm.token_weight(n) for n in lengths for _ in range(n)])
    sums = algorithm.loss(TokenBatch(log_probs_K, log_probs_K.detach(), advantages_K, weights_K))
    (sums.loss / algorithm.denominator(sum(lengths), len(lengths))).backward()
    torch.testing.assert_close(log_probs_K.grad, -advantages_K * torch.tensor(shares))


def test_strict_single_step_has_ratio_one():
    log_probs_K = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = TokenBatch(log_probs_K, torch.tensor([-1.5, -2.0]), torch.tensor([2.0, -1.0]), torch.ones(2))
    sums = build_algorithm(AlgorithmSection()).loss(batch)
    sums.loss.backward()
    torch.testing.assert_close(log_probs_K.grad, torch.tensor([-2.0, 1.0]))


def test_importance_correction_is_capped_detached_and_skips_unknown_tokens():
    log_probs_K = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine_K = torch.tensor([-1.5, -9.0, float("nan")])
    batch = TokenBatch(log_probs_K, engine_K, torch.ones(3), torch.ones(3))
    build_algorithm(AlgorithmSection(options={"importance_cap": 2.0})).loss(batch).loss.backward()
    expected_K = -torch.tensor([0.5, 1.0, 0.0]).exp().clamp(max=2.0)
    torch.testing.assert_close(log_probs_K.grad, expected_K)
    weights_K = truncated_importance(log_probs_K, engine_K, 2.0)
    assert not weights_K.requires_grad


def test_equal_rewards_have_exactly_zero_advantage():
    rewards_GN = torch.tensor([[0.1 + 0.2] * 3], dtype=torch.float64)
    assert build_algorithm(AlgorithmSection()).advantages(rewards_GN).tolist() == [[0.0, 0.0, 0.0]]


def test_unknown_algorithm_names_the_nearest():
    assert ALGORITHMS.names() == ["grpo"]
    with pytest.raises(Refusal, match="did you mean 'grpo'"):
        build_algorithm(AlgorithmSection(name="grop"))


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"normalise_std": False}, "algorithm.options.normalise_std", "did you mean 'normalize_std'"),
        ({"loss_aggregation": "token"}, "algorithm.options.loss_aggregation", "did you mean 'token-mean'"),
        ({"importance_cap": -1}, "algorithm.options.importance_cap", "greater than 0"),
        ({"clip_high": 0.28}, "algorithm.options.clip_high", "unknown key"),
    ],
)
def test_wrong_options_are_named_by_key(options, key, words):
    with pytest.raises(Refusal) as caught:
        build_algorithm(AlgorithmSection(options=options))
    assert caught.value.metadata["key"] == key and words in caught.value.message


@pytest.mark.parametrize("options", [{}, {"normalize_std": False, "importance_cap": 2.0}])
def test_grpo_holds_the_contract(options):
    assert check_algorithm("grpo", options).barrier is Barrier.GROUP


class Averaged(Grpo):
    """Divides by its micro-batch, as a loss must not."""

    def loss(self, batch):
        return LossSums(super().loss(batch).loss / len(batch.log_probs_K))


def test_the_contract_finds_a_loss_that_is_no_sum(monkeypatch):
    plugin = Plugin(Averaged, GrpoOptions, "wrong")
    monkeypatch.setattr("headrace_trainer.algorithms.plugins.GRPO", plugin)
    with pytest.raises(AssertionError, match="no unnormalised sum"):
        check_algorithm("grpo", {})
