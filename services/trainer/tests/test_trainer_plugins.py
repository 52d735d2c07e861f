"""Every built-in algorithm: the contract, its functions, its options, and what it makes of a batch."""

from __future__ import annotations

from dataclasses import replace

import algorithm_losses as losses
import pytest
import torch
from headrace_schema.rules.asked import COMPARING_TWO, IMITATING, JUDGING
from headrace_schema.sections.learning import AlgorithmSection
from headrace_schema.workflow import SESSION
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm, functional
from headrace_trainer.algorithms._base import Barrier, Outcomes, Refill, TokenBatch
from headrace_trainer.algorithms.contract import check_algorithm
from headrace_trainer.errors import Refusal

GIVEN = [*IMITATING, *COMPARING_TWO, *JUDGING]
NAMES = [name for name in ALGORITHMS.names() if name not in (*GIVEN, SESSION)]
"""Of answers that a policy sampled."""
BATCH = {"clip_cov", "gpg", "kl_cov", "ppo", "reinforce_pp", "reinforce_pp_baseline"}
ALONE = ["distill", "ppo", "reinforce", "reinforce_pp"]
LENGTHS = [3, 0, 5, 4, 2, 1]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25]


def outcomes(longest=5):
    return Outcomes(
        rewards_B=torch.tensor(REWARDS, dtype=torch.float64),
        groups_B=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask_BT=torch.arange(5) < torch.tensor(LENGTHS)[:, None],
        lengths_B=torch.tensor([3, 4, 5, 4, 2, 1]),
        longest=longest,
    )


def build(name, **options):
    return build_algorithm(AlgorithmSection(name=name, options=options))


@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 2, "minibatches": 2, "correction": "truncate", "correction_high": 2.0}],
    ids=["one", "passes"],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds(name, options):
    waits = options or name in BATCH
    assert check_algorithm(name, options).barrier is (Barrier.BATCH if waits else Barrier.GROUP)


@pytest.mark.parametrize("name", GIVEN)
def test_the_contract_holds_where_the_data_gives_the_answers(name):
    assert check_algorithm(name, {}).barrier is Barrier.BATCH


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALONE])
def test_a_group_of_one_is_refused(name):
    with pytest.raises(Refusal, match=r"algorithm\.group_size"):
        build_algorithm(AlgorithmSection(name=name, group_size=1))


def test_only_dapo_samples_dynamically_unless_asked():
    assert {name: build(name).refill for name in NAMES if build(name).refill != Refill()} == {
        "dapo": Refill(True, 3)
    }
    assert build("rloo", drop_equal=True, max_refill=2).refill == Refill(drop_equal=True, most=2)


@pytest.mark.parametrize("name", ALONE)
def test_algorithms_without_groups_take_groups_of_one(name):
    assert build_algorithm(AlgorithmSection(name=name, group_size=1)).least_group == 1


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("dr_grpo", {"normalize_std": True}, "normalize_std"),
        ("dapo", {"loss_aggregation": "token-mean"}, "loss_aggregation"),
        ("dapo", {"overlong_factor": 2.0}, "overlong_factor"),
        ("grpo", {"overlong_buffer": 4}, "overlong_buffer"),
        ("gmpo", {"epochs": 2, "dual_clip": 3.0}, "dual_clip"),
        ("sapo", {"epochs": 2, "clip_low": 0.2}, "clip_low"),
        ("sapo", {"tau_positive": 2.0}, "tau_positive"),
        ("rloo", {"gamma": 0.9}, "gamma"),
        ("gspo", {"clip_high": 1e-3}, "clip_high"),
        ("grpo", {"critic": "head"}, "critic"),
        ("ppo", {"value_clip": 0.1}, "value_clip"),
        ("grpo", {"kl_estimator": "k1"}, "kl_estimator"),
        ("grpo", {"kl_target": 0.1}, "kl_target"),
        ("grpo", {"kl_loss_coef": 0.1, "kl_horizon": 100}, "kl_horizon"),
        ("grpo", {"kl_reward_coef": 0.1}, "kl_reward_coef"),
        ("rloo", {"kl_reward_coef": 0.1, "kl_estimator": "k3+"}, "kl_estimator"),
        ("rloo", {"kl_reward_coef": 0.1, "kl_loss_coef": 0.1, "kl_target": 0.1}, "kl_target"),
        ("gpg", {"epochs": 2, "clip_low": 0.1}, "clip_low"),
        ("clip_cov", {"cov_low": 6.0}, "cov_low"),
        ("kl_cov", {"cov_coef": 0.5}, "cov_coef"),
        ("distill", {"normalize_std": True}, "normalize_std"),
        ("ppo", {"critic_path": "somewhere"}, "critic_path"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(name, options, key):
    with pytest.raises(Refusal) as caught:
        build(name, **options)
    assert caught.value.metadata["key"] == f"algorithm.options.{key}"


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("grpo", functional.grpo_advantages),
        ("dr_grpo", functional.dr_grpo_advantages),
        ("rloo", functional.rloo_advantages),
        ("opo", functional.opo_advantages),
        ("passk_grpo", functional.passk_grpo_advantages),
        ("reinforce_pp_baseline", functional.reinforce_plus_plus_baseline_advantages),
        ("reinforce_pp", lambda r, g, m: functional.reinforce_plus_plus_advantages(r, m).advantages),
    ],
)
def test_advantages_are_those_of_the_function(name, function):
    given = outcomes()
    expected_BT = function(given.rewards_B, given.groups_B, given.mask_BT)
    torch.testing.assert_close(build(name).advantages(given), expected_BT)


def first_of_group(given):
    return torch.stack([given.rewards_B[given.groups_B == group][0] for group in given.groups_B])


def test_remax_compares_with_the_first_answer_of_each_group():
    given = outcomes()
    expected_BT = (given.rewards_B - first_of_group(given))[:, None] * given.mask_BT
    torch.testing.assert_close(build("remax").advantages(given), expected_BT)
    assert build("remax").greedy_first and not build("rloo").greedy_first


def test_dapo_shapes_the_rewards_of_long_answers():
    given = outcomes(longest=5)
    plain_BT = build("dapo").advantages(given)
    shaped_BT = build("dapo", overlong_buffer=2, overlong_factor=0.5).advantages(given)
    rewards_B = given.rewards_B - torch.tensor([0.0, 0.25, 0.5, 0.25, 0.0, 0.0])
    torch.testing.assert_close(
        shaped_BT, functional.grpo_advantages(rewards_B, given.groups_B, given.mask_BT)
    )
    torch.testing.assert_close(plain_BT, build("grpo").advantages(given))


@pytest.mark.parametrize(
    ("name", "options", "loss"),
    [
        ("grpo", {"loss_aggregation": "seq-mean-token-mean"}, ("ppo_loss", "seq-mean-token-mean", {})),
        ("dapo", {}, ("ppo_loss", "token-mean", {"clip_high": 0.28})),
        ("dr_grpo", {"norm_length": 5}, ("ppo_loss", "seq-mean-token-sum-norm", {"norm_length": 5})),
        (
            "gspo",
            {"clip_low": 0.1, "clip_high": 0.1},
            ("gspo_loss", "seq-mean-token-mean", {"clip_low": 0.1, "clip_high": 0.1}),
        ),
        ("cispo", {}, ("cispo_loss", "token-mean", {})),
        ("sapo", {}, ("sapo_loss", "seq-mean-token-mean", {})),
        ("gmpo", {}, ("gmpo_loss", None, {})),
    ],
)
@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_step_streamed_in_micro_batches_is_the_function_s_loss_of_the_batch(name, options, loss, cap):
    """In value and gradient, though each micro-batch knows neither the others nor the totals."""
    algorithm = build(
        name, epochs=2, **options, **({"correction": "truncate", "correction_high": cap} if cap else {})
    )
    given = outcomes()
    generator = torch.Generator().manual_seed(3)
    mask_BT = given.mask_BT
    log_probs_BT = (-torch.rand(6, 5, generator=generator)).requires_grad_()
    old_BT = log_probs_BT.detach() + 0.3 * torch.randn(6, 5, generator=generator)
    engine_BT = old_BT + 0.3 * torch.randn(6, 5, generator=generator)
    advantages_BT = algorithm.advantages(given).float()
    total = 0.0
    for rows in ([0, 2], [3], [4, 5]):
        flat = mask_BT[rows]
        lengths = [LENGTHS[row] for row in rows]
        batch = TokenBatch(
            log_probs_K=log_probs_BT[rows][flat],
            old_log_probs_K=old_BT[rows][flat],
            engine_log_probs_K=engine_BT[rows][flat],
            advantages_K=advantages_BT[rows][flat],
            weights_K=torch.tensor([algorithm.token_weight(n) for n in lengths for _ in range(n)]),
            sequences_K=torch.repeat_interleave(torch.tensor(lengths)),
        )
        total = total + algorithm.loss(batch).loss
    total = total / algorithm.denominator(sum(LENGTHS), sum(1 for n in LENGTHS if n))
    function, aggregation, more = loss
    weights_BT = cap and functional.truncated_importance_weights(old_BT, engine_BT, mask_BT, high=cap)
    whole_BT = log_probs_BT.detach().clone().requires_grad_()
    expected = getattr(losses, function)(
        whole_BT,
        old_BT,
        advantages_BT,
        mask_BT,
        weights=weights_BT,
        **more,
        **({"aggregation": aggregation} if aggregation else {}),
    )
    torch.testing.assert_close(total, expected.loss)
    total.backward()
    expected.loss.backward()
    torch.testing.assert_close(log_probs_BT.grad, whole_BT.grad)


@pytest.mark.parametrize(
    "options", [{"kl_loss_coef": 0.1, "entropy_coef": 0.01}, {"kl_loss_coef": 0.1, "epochs": 2}]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_contract_holds_with_kl_and_entropy(name, options):
    algorithm = check_algorithm(name, options)
    assert algorithm.every_token and "reference_log_probs" in algorithm.columns


@pytest.mark.parametrize("name", ["grpo", "kl_cov", "clip_cov", "reinforce_pp_baseline", "ppo"])
def test_the_contract_holds_with_credit_by_turn(name):
    algorithm = check_algorithm(name, {"credit": "turn", "turn_discount": 0.9})
    assert algorithm.turn_credit is not None


def with_columns(given, **columns):
    generator = torch.Generator().manual_seed(7)
    names = ("old_log_probs", "reference_log_probs")
    made = {
        name: -torch.rand(6, 5, generator=generator, dtype=torch.float64) * given.mask_BT for name in names
    }
    return replace(given, columns_BT={**made, **columns})


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_rewards_are_those_of_the_functions(estimator):
    given = with_columns(outcomes())
    options = {"kl_reward_coef": 0.2, "kl_estimator": estimator}
    old_BT, reference_BT = given.columns_BT.values()
    mask_BT = given.mask_BT
    kl_BT = functional.kl_estimate(old_BT, reference_BT, estimator, mask_BT)
    penalised_BT = functional.kl_penalised_rewards(given.rewards_B, kl_BT, 0.2, mask_BT)
    centred_B = functional.dr_grpo_advantages(given.rewards_B, given.groups_B)
    whitened = functional.reinforce_plus_plus_advantages
    expected = {
        "reinforce_pp": whitened(penalised_BT, mask_BT).advantages,
        "reinforce_pp_baseline": whitened(
            functional.kl_penalised_rewards(centred_B, kl_BT, 0.2, mask_BT), mask_BT
        ).advantages,
        "rloo": functional.rloo_advantages(given.rewards_B - 0.2 * kl_BT.sum(1), given.groups_B, mask_BT),
        "reinforce": functional.discounted_returns(penalised_BT, mask_BT),
        "remax": functional.remax_advantages(penalised_BT, first_of_group(given), mask_BT).advantages,
    }
    for name, advantages_BT in expected.items():
        algorithm = build(name, **options)
        torch.testing.assert_close(algorithm.advantages(given), advantages_BT)
        assert (
            set(algorithm.columns) == {"old_log_probs", "reference_log_probs"} and not algorithm.every_token
        )


def test_distillation_goes_towards_the_teacher_whatever_the_rewards():
    given = with_columns(outcomes())
    old_BT, teacher_BT = given.columns_BT.values()
    algorithm = build("distill")
    assert algorithm.needs_teacher and not build("grpo", kl_loss_coef=0.1).needs_teacher
    torch.testing.assert_close(algorithm.advantages(given), (teacher_BT - old_BT) * given.mask_BT)
    torch.testing.assert_close(
        algorithm.advantages(replace(given, rewards_B=0 * given.rewards_B)),
        (teacher_BT - old_BT) * given.mask_BT,
    )


def test_gpg_scales_by_the_batch_or_by_alpha():
    given = outcomes()
    assert build("gpg", alpha=2.0).barrier is Barrier.GROUP
    for alpha, factor in ((None, 6 / 4), (2.0, 2.0)):
        expected_BT = factor * functional.dr_grpo_advantages(given.rewards_B, given.groups_B, given.mask_BT)
        torch.testing.assert_close(build("gpg", alpha=alpha).advantages(given), expected_BT)


def test_clip_cov_holds_back_as_many_tokens_as_verl_of_the_same_candidates():
    given = replace(with_columns(outcomes()), draw=5)
    plain_BT = build("grpo").advantages(given)
    options = {"cov_fraction": 0.2, "cov_low": 0.0, "cov_high": 9.0}
    found_BT = build("clip_cov", **options).advantages(given)
    held_BT = (found_BT == 0) & (plain_BT != 0)
    cov_BT = functional.token_covariances(given.columns_BT["old_log_probs"], plain_BT, given.mask_BT)
    assert int(held_BT.sum()) == int(0.2 * sum(LENGTHS)) and bool((cov_BT[held_BT] > 0).all())
    assert found_BT[~held_BT].equal(plain_BT[~held_BT])
    again_BT = build("clip_cov", **options).advantages(given)
    other_BT = build("clip_cov", **options).advantages(replace(given, draw=6))
    assert again_BT.equal(found_BT) and not other_BT.equal(found_BT)


def test_kl_cov_is_the_function_s_loss_where_covariances_are_the_batch_s():
    given = with_columns(outcomes())
    mask_BT, old_BT = given.mask_BT, given.columns_BT["old_log_probs"]
    algorithm = build("kl_cov", epochs=2, cov_fraction=0.2, cov_coef=0.7)
    advantages_BT, paying_BT = algorithm.advantages(given)
    new_BT = (old_BT + 0.1).requires_grad_()  # a shift of all log-probs leaves their covariances alone
    batch = TokenBatch(
        log_probs_K=new_BT[mask_BT],
        old_log_probs_K=old_BT[mask_BT],
        engine_log_probs_K=old_BT[mask_BT],
        advantages_K=advantages_BT[mask_BT],
        weights_K=torch.ones(15, dtype=torch.float64),
        sequences_K=torch.repeat_interleave(torch.tensor(LENGTHS)),
        columns_K={"returns": paying_BT[mask_BT]},
    )
    whole_BT = new_BT.detach().clone().requires_grad_()
    expected = losses.kl_cov_loss(
        whole_BT, old_BT, advantages_BT, mask_BT, cov_fraction=0.2, kl_coefficient=0.7
    )
    total = algorithm.loss(batch).loss / 15
    torch.testing.assert_close(total, expected.loss)
    total.backward()
    expected.loss.backward()
    torch.testing.assert_close(new_BT.grad, whole_BT.grad)
