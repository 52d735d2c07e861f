"""Episodes in rows: ends, time limits, chunks and successes, against the definition step by step."""

from __future__ import annotations

import algorithm_losses as losses
import pytest
import torch
from headrace_robots.trainer.algorithms import advantages as alg
from headrace_trainer.algorithms import grpo_advantages
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def rows(draw):
    """Rows of random rewards, values and ends."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 7)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numbers = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name in ("rewards_BT", "values_BT", "final_values_BT")
    }
    ends = {name: torch.rand(shape, generator=generator) < 0.25 for name in ("terminated_BT", "truncated_BT")}
    return numbers | ends | {"next_values_B": torch.randn(shape[0], generator=generator, dtype=torch.float64)}


def by_definition(row, gamma, lam):
    """Each episode alone, as a sum of discounted errors."""
    ended_BT = row["terminated_BT"] | row["truncated_BT"]
    found_BT = torch.zeros_like(row["values_BT"])
    for b in range(len(found_BT)):
        for start in range(found_BT.shape[1]):
            weight = 1.0
            for t in range(start, found_BT.shape[1]):
                if row["terminated_BT"][b, t]:
                    after = 0.0
                elif row["truncated_BT"][b, t]:
                    after = row["final_values_BT"][b, t]
                elif t + 1 < found_BT.shape[1]:
                    after = row["values_BT"][b, t + 1]
                else:
                    after = row["next_values_B"][b]
                error = row["rewards_BT"][b, t] + gamma * after - row["values_BT"][b, t]
                found_BT[b, start] += weight * error
                weight *= gamma * lam
                if ended_BT[b, t]:
                    break
    return found_BT


@given(row=rows(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.8, 1.0]))
@STEPS
def test_advantages_are_those_of_each_episode_alone(row, gamma, lam):
    found = alg.episode_advantages(**row, gamma=gamma, lam=lam)
    torch.testing.assert_close(found.advantages, by_definition(row, gamma, lam))
    torch.testing.assert_close(found.returns, found.advantages + row["values_BT"])


@given(row=rows(), column=st.integers(0, 6), size=st.floats(-1e3, 1e3))
@STEPS
def test_nothing_flows_back_over_an_end(row, column, size):
    """Neither rewards nor values of the next episode, nor final values where none was cut, matter."""
    column %= row["values_BT"].shape[1]
    row["truncated_BT"][:, column] = True
    wanted_BT = alg.episode_advantages(**row).advantages[:, : column + 1]
    for name in ("rewards_BT", "values_BT", "final_values_BT"):
        row[name] = row[name].clone()
        row[name][:, column + 1 :] += size
    cut_BT = row["truncated_BT"] & ~row["terminated_BT"]
    row["final_values_BT"] = torch.where(cut_BT, row["final_values_BT"], torch.nan)
    row["next_values_B"] = (
        row["next_values_B"] + size if column + 1 < row["values_BT"].shape[1] else row["next_values_B"]
    )
    torch.testing.assert_close(alg.episode_advantages(**row).advantages[:, : column + 1], wanted_BT)


def test_a_time_limit_bootstraps_and_an_end_does_not():
    row = {
        "rewards_BT": torch.ones(2, 1),
        "values_BT": torch.zeros(2, 1),
        "final_values_BT": torch.full((2, 1), 10.0),
        "truncated_BT": torch.tensor([[True], [True]]),
        "terminated_BT": torch.tensor([[False], [True]]),
        "next_values_B": torch.full((2,), 99.0),
    }
    assert alg.episode_advantages(**row, gamma=0.5).advantages[:, 0].tolist() == [6.0, 1.0]


@st.composite
def chunked(draw):
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards_BTC = torch.randn(shape, generator=generator, dtype=torch.float64)
    lengths_BT1 = torch.randint(0, shape[2] + 1, (*shape[:2], 1), generator=generator)
    success_BTC = torch.rand(shape, generator=generator) < 0.3
    return rewards_BTC, torch.arange(shape[2]) < lengths_BT1, success_BTC


@given(chunk=chunked())
@STEPS
def test_steps_after_a_success_are_masked(chunk):
    _, valid_BTC, success_BTC = chunk
    found_BTC = alg.until_success_mask(success_BTC, valid_BTC)
    for row, valid_K, success_K in zip(
        found_BTC.flatten(1), valid_BTC.flatten(1), success_BTC.flatten(1), strict=True
    ):
        places = [k for k in range(len(row)) if valid_K[k] and success_K[k]]
        last = places[0] if places else len(row)
        assert row.tolist() == [bool(valid_K[k]) and k <= last for k in range(len(row))]
    flat_BT = alg.until_success_mask(success_BTC.flatten(1), valid_BTC.flatten(1))
    assert torch.equal(flat_BT, found_BTC.flatten(1))


@given(chunk=chunked(), noise=st.integers(0, 2**31))
@STEPS
def test_groups_compare_trajectories_and_learn_nothing_after_a_success(chunk, noise):
    """GRPO on trajectories: the outcome is compared, masked steps carry neither advantage nor loss."""
    _, valid_BTC, success_BTC = chunk
    success_BT, valid_BT = success_BTC.flatten(1), valid_BTC.flatten(1)
    mask_BT = alg.until_success_mask(success_BT, valid_BT)
    outcomes_B = (success_BT & valid_BT).any(1).double()
    advantages_BT = grpo_advantages(outcomes_B, [0] * len(mask_BT), mask_BT, singletons="zero")
    assert not advantages_BT[~mask_BT].any()
    log_probs_BT = torch.randn(
        mask_BT.shape, generator=torch.Generator().manual_seed(noise), dtype=torch.float64
    )
    wanted = losses.ppo_loss(
        log_probs_BT, None, advantages_BT, mask_BT, aggregation="seq-mean-token-mean"
    ).loss
    spoilt_BT = log_probs_BT.masked_fill(~mask_BT, torch.nan)
    found = losses.ppo_loss(spoilt_BT, None, advantages_BT, mask_BT, aggregation="seq-mean-token-mean").loss
    torch.testing.assert_close(found, wanted)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shape"):
        alg.chunk_rewards(torch.zeros(2, 3, 4), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("how", "earned"),
    [
        ("none", [[[1, 2], [3, 0], [0, 0]], [[1, 1], [1, 1], [1, 1]]]),
        ("add", [[[1, 2], [13, 0], [0, 0]], [[1, 1], [1, 1], [1, -1]]]),
        ("replace", [[[0, 0], [10, 0], [0, 0]], [[0, 0], [0, 0], [0, -2]]]),
    ],
)
def test_a_score_is_earned_by_the_last_executed_action_of_its_row(how, earned):
    """Three chunks of two actions: the first ended within its second chunk, the other at the last action."""
    rewards = torch.tensor([[[1.0, 2], [3, 0], [0, 0]], [[1, 1], [1, 1], [1, 1]]])
    valid = torch.tensor([[[True, True], [True, False], [False, False]], [[True, True]] * 3])
    assert alg.with_scores(rewards, valid, torch.tensor([10.0, -2.0]), how).tolist() == earned
