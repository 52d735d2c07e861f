"""What no peer's vectors show: several turns, truncation, streaming units, refusals."""

from __future__ import annotations

import re
from pathlib import Path

import algorithm_losses as losses
import pytest
import torch
from headrace_trainer import algorithms as alg
from headrace_trainer.algorithms import functional

close = torch.testing.assert_close
# One trajectory of two turns, an observation of two tokens between them, then padding.
TURNS = torch.tensor([[1, 1, 0, 0, 1, 0]])
TRAINED = [0, 1, 4]


def test_gae_passes_over_observations_as_if_they_were_not_there():
    rewards_BT = torch.tensor([[0.5, 0.0, 9.0, 9.0, 1.0, 9.0]])
    values_BT = torch.tensor([[0.1, 0.2, 7.0, 7.0, 0.3, 7.0]])
    found = alg.gae_advantages(rewards_BT, values_BT, TURNS, gamma=0.9, lam=0.8)
    wanted = alg.gae_advantages(rewards_BT[:, TRAINED], values_BT[:, TRAINED], gamma=0.9, lam=0.8)
    for ours, dense in zip(found, wanted, strict=True):
        close(ours[:, TRAINED], dense)
        assert not ours[:, [2, 3, 5]].any()


def test_gae_bootstraps_a_truncated_trajectory_and_not_one_that_ended():
    rewards_BT, values_BT = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 9.0]] * 2)
    mask_BT = torch.tensor([[1, 1, 0]] * 2)
    bootstrap_B = torch.tensor([4.0, 0.0])
    found = alg.gae_advantages(
        rewards_BT, values_BT, mask_BT, gamma=0.5, lam=1.0, bootstrap_values_B=bootstrap_B
    )
    # delta_1 = 0.5 * 4 - 2 = 0 and delta_0 = 0.5 * 2 - 1 = 0 when truncated; -2 and 0 when ended.
    close(found.advantages, torch.tensor([[0.0, 0.0, 0.0], [-1.0, -2.0, 0.0]]))
    close(found.returns, torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))


def test_gae_carries_nothing_over_the_end_of_an_episode():
    rewards_BT, values_BT = torch.randn(1, 5), torch.randn(1, 5)
    dones_BT = torch.tensor([[0, 1, 0, 0, 1]])
    found = alg.gae_advantages(rewards_BT, values_BT, gamma=0.9, lam=0.7, dones_BT=dones_BT)
    parts = [
        alg.gae_advantages(rewards_BT[:, part], values_BT[:, part], gamma=0.9, lam=0.7)
        for part in (slice(0, 2), slice(2, 5))
    ]
    close(found.advantages, torch.cat([part.advantages for part in parts], 1))


def test_returns_pass_over_observations():
    rewards_BT = torch.tensor([[0.0, 1.0, 9.0, 9.0, 2.0, 9.0]])
    close(
        alg.discounted_returns(rewards_BT, TURNS, gamma=0.5), torch.tensor([[1.0, 2.0, 0.0, 0.0, 2.0, 0.0]])
    )
    close(alg.place_outcomes(torch.tensor([3.0]), TURNS), torch.tensor([[0.0, 0.0, 0.0, 0.0, 3.0, 0.0]]))


def test_raw_advantages_are_the_outcome():
    rewards_BT = torch.tensor([[1.0, 2.0, 9.0, 9.0, 3.0, 9.0]])
    close(alg.raw_advantages(rewards_BT, TURNS), 6.0 * TURNS)
    close(alg.raw_advantages(torch.tensor([2.0])), torch.tensor([2.0]))


def test_integer_and_bool_rewards_are_rewards():
    close(alg.rloo_advantages(torch.tensor([1, 0, 0]), [7, 7, 7]), torch.tensor([1.0, -0.5, -0.5]))
    close(
        alg.passk_grpo_advantages(torch.tensor([True, False]), ["a", "a"], normalize_std=False),
        torch.tensor([1.0, 0]),
    )


def test_pass_at_k_gives_a_tie_nothing():
    rewards_B = torch.tensor([1.0, 1.0, 0.0, 0.2, 0.9, 0.5])
    found_B = alg.passk_grpo_advantages(rewards_B, [0, 0, 0, 1, 1, 1], normalize_std=False)
    close(found_B, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.4, 0.0]))


@pytest.mark.parametrize(
    "advantages_of",
    [
        alg.grpo_advantages,
        alg.dr_grpo_advantages,
        alg.rloo_advantages,
        alg.gpg_advantages,
        lambda rewards, groups, **k: alg.opo_advantages(rewards, groups, torch.ones(3, 1), **k)[:, 0],
    ],
)
def test_a_group_of_one_is_refused_or_what_was_chosen(advantages_of):
    rewards_B, groups = torch.tensor([1.0, 0.0, 0.25]), [0, 0, 1]
    with pytest.raises(ValueError, match="group of one"):
        advantages_of(rewards_B, groups)
    assert advantages_of(rewards_B, groups, singletons="zero")[2] == 0
    assert advantages_of(rewards_B, groups, singletons="raw")[2] in (
        0.25,
        0.375,
    )  # GPG: times its alpha, 3 / 2


def test_opo_weighs_by_length():
    found_BT = alg.opo_advantages(torch.tensor([1.0, 0.0]), [0, 0], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    close(found_BT, torch.tensor([[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]]))


def test_whitening_has_mean_0_and_deviation_1_over_the_mask():
    values_BT, mask_BT = torch.randn(4, 9) * 3 + 5, torch.rand(4, 9) < 0.6
    for correction in (0, 1):
        found = alg.whiten(values_BT, mask_BT, correction=correction)[mask_BT]
        close(found.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        close(found.std(correction=correction), torch.tensor(1.0))
    shifted = alg.whiten(values_BT, mask_BT, shift_mean=False)[mask_BT]
    close(shifted.mean(), values_BT[mask_BT].mean())


def test_gspo_of_tokens_and_of_sequences_agree_for_one_advantage_a_sequence():
    new_BT, advantages_B = -torch.rand(3, 4), torch.tensor([1.0, -2.0, 0.5])
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0]])
    grads = []
    for level in ("sequence", "token"):
        leaf_BT = new_BT.clone().requires_grad_()
        losses.gspo_loss(
            leaf_BT, new_BT + 0.1, advantages_B, mask_BT, clip_low=0.5, level=level
        ).loss.backward()
        grads.append(leaf_BT.grad)
    assert grads[0].any()
    close(*grads)


def test_old_log_probs_none_is_the_policy_s_own_samples():
    leaf_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages_BT = torch.tensor([[2.0, -1.0]])
    loss, metrics = losses.ppo_loss(leaf_BT, None, advantages_BT, aggregation="seq-mean-token-sum")
    loss.backward()
    close(leaf_BT.grad, -advantages_BT)
    assert metrics["clip_fraction"] == 0 and metrics["ratio"] == 1


@pytest.mark.parametrize(
    ("gap", "advantage", "moves"), [(0.3, 1.0, False), (0.25, 1.0, False), (0.2, 1.0, True)]
)
def test_clip_higher_clips_at_its_own_bound(gap, advantage, moves):
    leaf_BT = torch.tensor([[-1.0]], requires_grad=True)
    losses.ppo_loss(
        leaf_BT, leaf_BT.detach() - gap, torch.tensor([advantage]), clip_high=0.28
    ).loss.backward()
    assert bool(leaf_BT.grad.any()) is moves


def test_straight_through_estimates_have_the_value_of_one_and_the_gradient_of_k2():
    ref_BT = torch.tensor([[-2.0, -0.5, -1.0]])
    leaf_BT = torch.tensor([[-1.0, -1.5, -1.2]], requires_grad=True)
    for name in ("k1", "k3", "abs"):
        straight_BT = alg.kl_estimate(leaf_BT, ref_BT, f"{name}+")
        close(straight_BT, alg.kl_estimate(leaf_BT, ref_BT, name))
        (grad_BT,) = torch.autograd.grad(straight_BT.sum(), leaf_BT)
        close(grad_BT, (leaf_BT - ref_BT).detach())


def test_kl_as_a_reward_of_several_turns():
    kl_BT = torch.full((1, 6), 0.5)
    found_BT = alg.kl_penalised_rewards(torch.tensor([1.0]), kl_BT, 0.1, TURNS)
    close(found_BT, torch.tensor([[-0.05, -0.05, 0.0, 0.0, 0.95, 0.0]]))


def test_kl_controllers():
    fixed = alg.FixedKLController(0.3)
    assert fixed.update(100.0, 8) == fixed.value == 0.3
    adaptive = alg.AdaptiveKLController(1.0, target=2.0, horizon=100)
    assert adaptive.update(100.0, 10) == pytest.approx(1.02)
    with pytest.raises(ValueError, match="horizon"):
        alg.AdaptiveKLController(1.0, target=2.0, horizon=0)


def test_overlong_penalty_is_linear_in_the_buffer_and_stops():
    found_B = alg.overlong_penalty(torch.tensor([10, 16, 18, 20, 25]), 20, 4, factor=0.5)
    close(found_B, torch.tensor([0.0, 0.0, -0.25, -0.5, -0.5]))
    with pytest.raises(ValueError, match="buffer"):
        alg.overlong_penalty(torch.tensor([1]), 4, 5)


def test_groups_of_equal_rewards_teach_nothing():
    keep_B = alg.informative_groups(torch.tensor([1, 0, 1, 1, 1, 1]), ["a", "a", "b", "b", "a", "b"])
    assert keep_B.tolist() == [True, True, False, False, True, False]
    assert not alg.informative_groups(torch.tensor([0.5, 0.6]), [0, 0], tolerance=0.2).any()


def test_truncated_sequences_are_dropped_or_penalised():
    truncated_B = torch.tensor([True, False])
    assert alg.drop_truncated(torch.ones(2, 2), truncated_B).tolist() == [[False, False], [True, True]]
    rewards_B = torch.tensor([1.0, 1.0])
    assert alg.truncation_penalty(rewards_B, truncated_B, coefficient=0.25).tolist() == [0.25, 1.0]
    assert alg.truncation_penalty(rewards_B, truncated_B, coefficient=-0.5).tolist() == [-0.5, 1.0]


def test_flat_tokens_become_rows_and_back_with_their_gradient():
    values_K = torch.arange(6.0, requires_grad=True)
    padded_BT, mask_BT = alg.pad_sequences(values_K, [3, 1, 2])
    close(padded_BT.detach(), torch.tensor([[0.0, 1, 2], [3, 0, 0], [4, 5, 0]]))
    close(padded_BT[mask_BT], values_K)
    (padded_BT * 2).sum().backward()
    close(values_K.grad, torch.full((6,), 2.0))
    with pytest.raises(ValueError, match="add up to 5"):
        alg.pad_sequences(values_K, [3, 2])


def test_terms_of_flat_tokens_are_those_of_rows():
    new_BT = -torch.rand(2, 3)
    old_BT, advantages_BT = new_BT + 0.3, torch.randn(2, 3)
    for terms_of in (alg.ppo_terms, alg.cispo_terms, alg.sapo_terms):
        rows = terms_of(new_BT, old_BT, advantages_BT)
        flat = terms_of(new_BT.flatten(), old_BT.flatten(), advantages_BT.flatten())
        close(rows.loss.flatten(), flat.loss)


def test_corrections_mask_and_truncate():
    old_BT, sampler_BT = torch.zeros(1, 4), -torch.tensor([[0.2, 5.0, 4.0, 0.1]]).log()
    mask_BT = torch.tensor([[1, 1, 0, 1]])
    close(
        alg.truncated_importance_weights(old_BT, sampler_BT, mask_BT, low=0.5, high=2.0),
        torch.tensor([[0.5, 2.0, 0.0, 0.5]]),
    )
    close(
        alg.icepop_weights(old_BT, sampler_BT, mask_BT, low=0.15, high=2.0),
        torch.tensor([[0.2, 0.0, 0.0, 0.0]]),
    )
    assert alg.ratio_mask(old_BT, sampler_BT, mask_BT, low=0.15).tolist() == [[True, False, False, False]]
    product_BT = alg.importance_ratios(old_BT, sampler_BT, mask_BT, level="sequence")
    close(product_BT, torch.tensor([[0.1, 0.1, 0.0, 0.1]]))
    close(
        alg.importance_ratios(old_BT, sampler_BT, mask_BT, level="geometric")[0, 0],
        torch.tensor(0.1) ** (1 / 3),
    )


@pytest.mark.parametrize(
    ("reduce", "kept"),
    [
        ("token", [[1, 0], [1, 1]]),
        ("sum", [[0, 0], [1, 1]]),
        ("mean", [[1, 1], [1, 1]]),
        ("max", [[0, 0], [1, 1]]),
    ],
)
def test_divergence_masks_tokens_or_sequences(reduce, kept):
    log_probs_BT, sampler_BT = torch.zeros(2, 2), torch.tensor([[0.1, 1.2], [0.2, 0.3]])
    found_BT = alg.divergence_mask(log_probs_BT, sampler_BT, high=0.7, estimator="k1", reduce=reduce)
    assert found_BT.int().tolist() == kept


def test_entropy_of_a_uniform_and_of_a_certain_distribution():
    logits_BTV = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, -torch.inf, -torch.inf, -torch.inf]]])
    close(alg.entropy_from_logits(logits_BTV), torch.tensor([[1.3862944, 0.0]]))


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_entries_that_no_model_gives_add_nothing_to_a_distillation(direction):
    student_BTV = torch.randn(1, 2, 5)
    teacher_BTV = torch.randn(1, 2, 5)
    wanted, _ = losses.distillation_loss(student_BTV, teacher_BTV, direction=direction)
    leaf_BTV = torch.nn.functional.pad(student_BTV, (0, 2), value=-torch.inf).requires_grad_()
    padded_BTV = torch.nn.functional.pad(teacher_BTV, (0, 2), value=-torch.inf)
    found, _ = losses.distillation_loss(leaf_BTV, padded_BTV, direction=direction)
    found.backward()
    close(found.detach(), wanted)
    assert torch.isfinite(leaf_BTV.grad[..., :5]).all()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_distillation_over_all_words_is_that_of_whole_logits(direction):
    student_NV, teacher_NV = 2 * torch.randn(2, 50, 32)
    leaf_NV, other_NV = student_NV.clone().requires_grad_(), student_NV.clone().requires_grad_()
    wanted = alg.distillation_terms(leaf_NV, teacher_NV, direction=direction).loss
    top = teacher_NV.log_softmax(-1).topk(32)
    own_NM = other_NV.log_softmax(-1).gather(-1, top.indices)
    found = alg.top_distillation_terms(own_NM, top.values, direction=direction).loss
    close(found, wanted, rtol=1e-5, atol=1e-5)
    for loss in (wanted, found):
        loss.sum().backward()
    close(other_NV.grad, leaf_NV.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_distillation_over_fewer_words_is_a_divergence_that_rises_to_the_whole_one(direction):
    student_NV, teacher_NV = 2 * torch.randn(2, 50, 32)
    whole = alg.distillation_terms(student_NV, teacher_NV, direction=direction).loss
    before = torch.zeros(50)
    for count in (1, 2, 8, 20):
        top = teacher_NV.log_softmax(-1).topk(count)
        own_NM = student_NV.log_softmax(-1).gather(-1, top.indices)
        found = alg.top_distillation_terms(own_NM, top.values, direction=direction).loss
        assert (before - 1e-4 <= found).all() and (found <= whole + 1e-4).all()
        before = found
    same = alg.top_distillation_terms(top.values, top.values, direction=direction).loss
    close(same, torch.zeros(50), atol=1e-6, rtol=0)


def test_a_word_that_the_policy_does_not_know_counts_among_the_others():
    teacher_NM = torch.tensor([[0.5, 0.3, 0.1]]).log()
    leaf_NM = torch.tensor([[0.4, 0.2, 0.3]]).log().requires_grad_()
    unknown_NM = teacher_NM.masked_fill(torch.tensor([False, False, True]), -torch.inf)
    found = alg.top_distillation_terms(leaf_NM, unknown_NM, direction="forward").loss
    wanted = alg.top_distillation_terms(leaf_NM[:, :2], teacher_NM[:, :2], direction="forward").loss
    close(found, wanted)
    found.sum().backward()
    assert leaf_NM.grad[0, 2] == 0 and torch.isfinite(leaf_NM.grad).all()


def test_a_teacher_s_advantage_is_its_lead():
    student_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    found_BT = alg.distillation_advantages(student_BT, torch.tensor([[-0.5, -9.0]]), torch.tensor([[1, 0]]))
    close(found_BT, torch.tensor([[0.5, 0.0]]))
    assert not found_BT.requires_grad


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: alg.aggregate(x, mode="token"), "choose one of token-mean"),
        (lambda x: alg.aggregate(x, norm_length=3), "norm_length has no effect on 'token-mean'"),
        (lambda x: alg.aggregate(x, torch.ones(1, 2)), "mask's shape"),
        (lambda x: losses.ppo_loss(x, x, torch.ones(3)), "fit no"),
        (lambda x: losses.ppo_loss(x, x, torch.ones(2, 4)), "fit no"),
        (lambda x: losses.ppo_loss(x, x, x, dual_clip=0.9), "exceed 1"),
        (lambda x: losses.gspo_loss(x, x, x, level="tokens"), "choose sequence, token or product"),
        (lambda x: alg.kl_estimate(x, x, "k4"), "choose one of k1"),
        (lambda x: alg.grpo_advantages(x[:, 0], [0]), "1 group ids for 2 sequences"),
        (lambda x: alg.grpo_advantages(x[:, 0], [0, 0], scale="std"), "choose group, batch or none"),
        (lambda x: alg.grpo_advantages(x[:, 0], [0, 0], singletons="no"), "choose refuse, zero or raw"),
        (lambda x: alg.importance_ratios(x, x, level="mean"), "choose token, sequence or geometric"),
        (lambda x: alg.divergence_mask(x, x, high=1.0, reduce="min"), "choose token, sum, mean or max"),
        (lambda x: losses.distillation_loss(x, x, direction="back"), "choose reverse, forward or jsd"),
        (lambda x: losses.distillation_loss(x, x, direction="jsd", beta=1.0), "between 0 and 1"),
        (lambda x: alg.high_entropy_mask(x, fraction=0.0), "fraction"),
        (lambda x: alg.truncation_penalty(x[:, 0], x[:, 0], coefficient=2.0), "at most 1"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 3))


def test_unknown_names_are_refused_by_name():
    with pytest.raises(AttributeError, match="ppo_lose"):
        _ = alg.ppo_lose


def test_every_function_is_documented_and_public():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    functions = [
        name for name in functional.__all__ if callable(getattr(alg, name)) and not name[0].isupper()
    ]
    assert len(functions) > 50
    assert not [name for name in functions if not re.search(rf"\b{name}\b", page)]
