"""Advantages against verl's own output on one fixed batch; losses and gradients against their definition."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm
from headrace_trainer.algorithms._base import Barrier, LossSums, Outcomes, TokenBatch
from headrace_trainer.algorithms.contract import check_algorithm
from headrace_trainer.algorithms.group_relative import Grpo
from headrace_trainer.algorithms.plugins import GrpoOptions
from headrace_trainer.errors import Refusal

VECTORS = json.loads((Path(__file__).parent / "data" / "verl_vectors.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in VECTORS["inputs"].items()}
CASES = {case["key"]: case for case in VECTORS["cases"]}
CLIPPED = ("clip_fraction", "dual_clip_fraction")
MASK_BT = INPUTS["response_mask"].bool()


def token_batch(log_probs_K, advantages_K, *, old_K=None, engine_K=None, weights_K=None, sequences_K=None):
    own_K = log_probs_K.detach()
    return TokenBatch(
        log_probs_K=log_probs_K,
        old_log_probs_K=own_K if old_K is None else old_K,
        engine_log_probs_K=own_K if engine_K is None else engine_K,
        advantages_K=advantages_K,
        weights_K=torch.ones_like(own_K) if weights_K is None else weights_K,
        sequences_K=torch.zeros(len(own_K), dtype=torch.long) if sequences_K is None else sequences_K,
    )


@pytest.mark.parametrize(("key", "normalize_std"), [("grpo", True), ("dr_grpo", False)])
def test_advantages_equal_verl(key, normalize_std):
    grpo = build_algorithm(AlgorithmSection(options={"normalize_std": normalize_std}))
    outcomes = Outcomes(
        rewards_B=INPUTS["seq_reward"],
        groups_B=INPUTS["prompt_index"],
        mask_BT=MASK_BT,
        lengths_B=MASK_BT.sum(1),
        longest=7,
    )
    expected_BT = torch.tensor(CASES[key]["outputs"]["advantages"])
    torch.testing.assert_close(grpo.advantages(outcomes), expected_BT)


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
    sums = algorithm.loss(token_batch(log_probs_K, advantages_K, weights_K=weights_K))
    (sums.loss / algorithm.denominator(sum(lengths), len(lengths))).backward()
    torch.testing.assert_close(log_probs_K.grad, -advantages_K * torch.tensor(shares))


def test_strict_single_step_has_ratio_one():
    log_probs_K = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = token_batch(log_probs_K, torch.tensor([2.0, -1.0]), engine_K=torch.tensor([-1.5, -2.0]))
    sums = build_algorithm(AlgorithmSection()).loss(batch)
    sums.loss.backward()
    torch.testing.assert_close(log_probs_K.grad, torch.tensor([-2.0, 1.0]))
    assert {name: float(value) for name, value in sums.token_sums.items()} == {
        "clip_fraction": 0,
        "approx_kl": 0,
    }


@pytest.mark.parametrize(
    ("options", "advantage", "ratio", "loss", "slope"),
    [
        ({}, 1.0, 1.19, -1.19, -1.19),
        ({}, 1.0, 1.3, -1.2, 0.0),
        ({"clip_high": 0.4}, 1.0, 1.3, -1.3, -1.3),
        ({}, 1.0, 0.5, -0.5, -0.5),
        ({}, -1.0, 0.7, 0.8, 0.0),
        ({"clip_low": 0.4}, -1.0, 0.7, 0.7, 0.7),
        ({}, -1.0, 5.0, 5.0, 5.0),
        ({"dual_clip": 3.0}, -1.0, 5.0, 3.0, 0.0),
        ({"dual_clip": 3.0}, 1.0, 0.1, -0.1, -0.1),
    ],
)
def test_the_clip_of_the_options_bounds_the_ratio_to_the_old_log_probs(
    options, advantage, ratio, loss, slope
):
    log_probs_K = torch.tensor([-1.0], requires_grad=True)
    old_K = log_probs_K.detach() - torch.tensor([ratio]).log()
    batch = token_batch(log_probs_K, torch.tensor([advantage]), old_K=old_K)
    sums = build_algorithm(AlgorithmSection(options={"epochs": 2, **options})).loss(batch)
    sums.loss.backward()
    torch.testing.assert_close(sums.loss.detach(), torch.tensor(loss))
    torch.testing.assert_close(log_probs_K.grad, torch.tensor([slope]))
    assert any(float(sums.token_sums.get(name, 0)) for name in CLIPPED) is (slope == 0)
    assert float(sums.token_sums["approx_kl"]) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)


def test_tokens_are_padded_by_sequence_and_back():
    values_K = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    batch = token_batch(values_K, values_K.detach(), sequences_K=torch.tensor([0, 0, 0, 1, 2, 2]))
    padded_ST = batch.padded(values_K)
    assert padded_ST.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert batch.mask().tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert batch.flat(padded_ST).tolist() == values_K.tolist()
    padded_ST.square().sum().backward()
    torch.testing.assert_close(values_K.grad, 2 * values_K.detach())


def test_importance_correction_is_capped_detached_and_skips_unknown_tokens():
    log_probs_K = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine_K = torch.tensor([-1.5, -9.0, float("nan")])
    batch = token_batch(log_probs_K, torch.ones(3), engine_K=engine_K)
    build_algorithm(AlgorithmSection(options={"correction": "truncate", "correction_high": 2.0})).loss(
        batch
    ).loss.backward()
    expected_K = -torch.tensor([0.5, 1.0, 0.0]).exp().clamp(max=2.0)
    torch.testing.assert_close(log_probs_K.grad, expected_K)


def test_equal_rewards_have_exactly_zero_advantage():
    outcomes = Outcomes(
        rewards_B=torch.tensor([0.1 + 0.2] * 3, dtype=torch.float64),
        groups_B=torch.zeros(3, dtype=torch.long),
        mask_BT=torch.ones(3, 1, dtype=torch.bool),
        lengths_B=torch.ones(3),
        longest=1,
    )
    assert build_algorithm(AlgorithmSection()).advantages(outcomes).tolist() == [[0.0], [0.0], [0.0]]


def test_a_group_of_one_has_nothing_to_compare():
    with pytest.raises(Refusal, match="use at least 2") as caught:
        build_algorithm(AlgorithmSection(group_size=1))
    assert caught.value.metadata["key"] == "algorithm.group_size"


def test_unknown_algorithm_names_the_nearest():
    assert {"grpo", "dapo", "reinforce_pp"} <= set(ALGORITHMS.names())
    with pytest.raises(Refusal, match="did you mean 'grpo'"):
        build_algorithm(AlgorithmSection(name="grop"))


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"normalise_std": False}, "algorithm.options.normalise_std", "did you mean 'normalize_std'"),
        ({"loss_aggregation": "token"}, "algorithm.options.loss_aggregation", "did you mean 'token-mean'"),
        ({"correction_high": -1}, "algorithm.options.correction_high", "greater than 0"),
        ({"clip_low": 1.0}, "algorithm.options.clip_low", "less than 1"),
        ({"dual_clip": 0.5}, "algorithm.options.dual_clip", "greater than 1"),
        ({"clip_high": 0.28}, "algorithm.options.clip_high", "would have no effect"),
        ({"target_kl": 0.1, "minibatches": 2}, "algorithm.options.target_kl", "no effect in the first pass"),
        ({"minibatches": 5}, "algorithm.options.minibatches", "use at most 4"),
        ({"epochs": 0}, "algorithm.options.epochs", "greater than or equal to 1"),
        ({"critic": True}, "algorithm.options.critic", "unknown key"),
    ],
)
def test_wrong_options_are_named_by_key(options, key, words):
    with pytest.raises(Refusal) as caught:
        build_algorithm(AlgorithmSection(options=options))
    assert caught.value.metadata["key"] == key and words in caught.value.message


@pytest.mark.parametrize(
    ("options", "barrier"),
    [
        ({}, Barrier.GROUP),
        ({"normalize_std": False, "correction": "truncate", "correction_high": 2.0}, Barrier.GROUP),
        ({"epochs": 2, "clip_high": 0.28}, Barrier.BATCH),
        ({"minibatches": 2}, Barrier.BATCH),
    ],
)
def test_grpo_holds_the_contract_and_waits_for_what_it_needs(options, barrier):
    assert check_algorithm("grpo", options).barrier is barrier


class Averaged(Grpo):
    """Divides by its micro-batch, as a loss must not."""

    def loss(self, batch):
        return LossSums(super().loss(batch).loss / len(batch.log_probs_K))


def test_the_contract_finds_a_loss_that_is_no_sum(monkeypatch):
    plugin = Plugin(Averaged, GrpoOptions, "wrong")
    monkeypatch.setattr("headrace_trainer.algorithms.plugins.GRPO", plugin)
    with pytest.raises(AssertionError, match="no unnormalised sum"):
        check_algorithm("grpo", {})


def test_the_page_lists_every_algorithm_with_its_options():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name in ALGORITHMS.names():
        plugin = ALGORITHMS.find(name)
        assert plugin.description in rows[name]
        missing = [key for key in plugin.options.model_fields if f"`{key}`" not in page]
        assert not missing, f"{name} has options that the page does not name: {missing}"
