"""What every advantage and loss must hold on any batch: padding, order, micro-batches, masks, extremes."""

from __future__ import annotations

import algorithm_losses as losses
import pytest
import torch
from headrace_trainer import algorithms as alg
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = settings(max_examples=10, deadline=None, derandomize=True)

# Losses of (log-probs, old log-probs, advantages, mask), by aggregation where it is the caller's choice.
LOSSES = {
    "ppo": losses.ppo_loss,
    "ppo clip-higher, dual clip": lambda *a, **k: losses.ppo_loss(*a, clip_high=0.28, dual_clip=3.0, **k),
    "ppo per sequence": lambda *a, **k: losses.ppo_loss(*a, aggregation="seq-mean-token-mean", **k),
    "ppo normalised": lambda *a, **k: losses.ppo_loss(
        *a, aggregation="seq-mean-token-sum-norm", norm_length=9, **k
    ),
    "gspo": losses.gspo_loss,
    "gspo wide": lambda *a, **k: losses.gspo_loss(*a, clip_low=0.9, clip_high=9.0, **k),
    "gspo of tokens": lambda *a, **k: losses.gspo_loss(*a, clip_low=0.2, clip_high=0.2, level="token", **k),
    "gmpo": losses.gmpo_loss,
    "gspo of products": lambda *a, **k: losses.gspo_loss(*a, level="product", **k),
    "vespo": losses.vespo_loss,
    "cispo": losses.cispo_loss,
    "sapo": losses.sapo_loss,
    "reinforce": lambda new, old, *a, **k: losses.reinforce_loss(new, *a, **k),
    "decoupled": lambda new, old, *a, **k: losses.decoupled_ppo_loss(new, old * 0.9, old, *a, **k),
}
MODES = {
    **dict.fromkeys(LOSSES, "token-mean"),
    **dict.fromkeys(
        ("ppo per sequence", "gspo", "gspo wide", "gspo of tokens", "gspo of products", "sapo"),
        "seq-mean-token-mean",
    ),
    "gmpo": "seq-mean-token-sum",
    "ppo normalised": "seq-mean-token-sum-norm",
}
# KL, SFT and value losses, called with the same four tensors.
OTHERS = {
    **{
        f"kl {name}": lambda new, old, adv, mask, name=name, **k: losses.kl_loss(
            new, old, mask, estimator=name, **k
        )
        for name in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
    },
    "sft": lambda new, old, adv, mask, **k: losses.sft_loss(new, mask, **k),
    "value": lambda new, old, adv, mask, **k: losses.value_loss(new, old, adv, mask, **k),
}
WITH_COVARIANCE = {"clip-cov": losses.clip_cov_loss, "kl-cov": losses.kl_cov_loss}

GROUPED = {
    "grpo": alg.grpo_advantages,
    "grpo over batch": lambda *a: alg.grpo_advantages(*a, scale="batch"),
    "dr_grpo": alg.dr_grpo_advantages,
    "rloo": alg.rloo_advantages,
    "reinforce++ baseline": alg.reinforce_plus_plus_baseline_advantages,
    "opo": alg.opo_advantages,
    "gpg": alg.gpg_advantages,
    "pass@k": alg.passk_grpo_advantages,
}
UNGROUPED = {
    "raw": lambda rewards, groups, mask: alg.raw_advantages(rewards, mask),
    "reinforce++": lambda rewards, groups, mask: alg.reinforce_plus_plus_advantages(rewards, mask, gamma=0.9)[
        0
    ],
    "remax": lambda rewards, groups, mask: alg.remax_advantages(rewards, rewards * 0.5, mask)[0],
    "gae": lambda rewards, groups, mask: alg.gae_advantages(
        rewards, mask * rewards[:, None], mask, gamma=0.9, lam=0.8, whiten_advantages=True
    )[0],
}
ADVANTAGES = GROUPED | UNGROUPED


@st.composite
def batches(draw, groups=3):
    """(log-probs, old log-probs, advantages, mask, rewards, groups); each group has 2 to 3 sequences."""
    ids = [group for group in range(draw(st.integers(1, groups))) for _ in range(draw(st.integers(2, 3)))]
    width = draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(ids), width)
    new_BT = -torch.rand(shape, generator=generator, dtype=torch.float64) * 4
    old_BT = new_BT + torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
    advantages_BT = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask_BT = (torch.rand(shape, generator=generator) < 0.7).double()
    mask_BT[:, 0] = 1
    rewards_B = torch.randint(0, 4, (len(ids),), generator=generator).double() / 3
    return new_BT, old_BT, advantages_BT, mask_BT, rewards_B, ids


def gradient(loss_of, new_BT, *rest, **options):
    new_BT = new_BT.clone().requires_grad_()
    loss = loss_of(new_BT, *rest, **options).loss
    (found_BT,) = torch.autograd.grad(loss, new_BT)
    return loss.detach(), found_BT


def same(ours, wanted):
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def pad(values_BT, columns=3, fill=0.0):
    return torch.nn.functional.pad(values_BT, (0, columns), value=fill)


@pytest.mark.parametrize("name", LOSSES | OTHERS | WITH_COVARIANCE)
@given(batch=batches())
@STEPS
def test_padding_and_masked_values_do_not_change_a_loss(name, batch):
    loss_of = (LOSSES | OTHERS | WITH_COVARIANCE)[name]
    new_BT, old_BT, advantages_BT, mask_BT, *_ = batch
    options = {"generator": torch.Generator().manual_seed(0)} if name == "clip-cov" else {}
    wanted, wanted_BT = gradient(loss_of, new_BT, old_BT, advantages_BT, mask_BT, **options)
    nan = float("nan")
    options = {"generator": torch.Generator().manual_seed(0)} if name == "clip-cov" else {}
    spoilt = [
        pad(value_BT.masked_fill(mask_BT == 0, nan), fill=nan) for value_BT in (new_BT, old_BT, advantages_BT)
    ]
    loss, found_BT = gradient(loss_of, *spoilt, pad(mask_BT), **options)
    same(loss, wanted)
    same(found_BT, pad(wanted_BT * mask_BT))


@pytest.mark.parametrize("name", LOSSES)
@given(batch=batches(), order=st.randoms(use_true_random=False))
@STEPS
def test_micro_batches_in_any_order_add_up_to_the_step(name, batch, order):
    """Numerators are summed first; the total is known, and divides, only at the end."""
    new_BT, old_BT, advantages_BT, mask_BT, *_ = batch
    wanted, wanted_BT = gradient(LOSSES[name], new_BT, old_BT, advantages_BT, mask_BT)
    rows = list(range(len(new_BT)))
    order.shuffle(rows)
    cut = order.randint(0, len(rows))
    numerator, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    found_BT = torch.zeros_like(new_BT)
    for part in (rows[:cut], rows[cut:]):
        if part:
            args = [value[part] for value in (new_BT, old_BT, advantages_BT, mask_BT)]
            loss, part_BT = gradient(LOSSES[name], *args, total=1)
            numerator, total = numerator + loss, total + alg.aggregation_total(args[-1], MODES[name])
            found_BT[part] = part_BT
    same(numerator / total, wanted)
    same(found_BT / total, wanted_BT)


@pytest.mark.parametrize("name", LOSSES | WITH_COVARIANCE)
@given(batch=batches())
@STEPS
def test_zero_advantages_give_no_gradient(name, batch):
    new_BT, old_BT, advantages_BT, mask_BT, *_ = batch
    options = {"kl_coefficient": 0.0} if name == "kl-cov" else {}
    loss_of = (LOSSES | WITH_COVARIANCE)[name]
    _, found_BT = gradient(loss_of, new_BT, old_BT, advantages_BT * 0, mask_BT, **options)
    assert not found_BT.any()


@pytest.mark.parametrize("name", LOSSES | OTHERS | WITH_COVARIANCE)
@pytest.mark.parametrize("gap", [-1e4, -90.0, 90.0, 1e4])
def test_extreme_ratios_stay_finite_in_float32(name, gap):
    new_BT = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    advantages_BT = torch.tensor([[1.0, -1.0], [-2.0, 0.5]])
    loss, found_BT = gradient(
        (LOSSES | OTHERS | WITH_COVARIANCE)[name], new_BT, new_BT - gap, advantages_BT, torch.ones(2, 2)
    )
    assert torch.isfinite(loss) and torch.isfinite(found_BT).all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_gives_a_loss_of_zero(name):
    new_BT = torch.tensor([[-1.0, -2.0]])
    loss, found_BT = gradient(LOSSES[name], new_BT, new_BT - 0.1, torch.ones(1, 2), torch.zeros(1, 2))
    assert loss == 0 and not found_BT.any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches())
@STEPS
def test_padding_and_masked_rewards_do_not_change_advantages(name, batch):
    *_, mask_BT, rewards_B, groups = batch
    rewards_BT = alg.place_outcomes(rewards_B, mask_BT)
    if name in ("remax", "gae"):
        wanted_BT = ADVANTAGES[name](rewards_B, groups, mask_BT)
        same(ADVANTAGES[name](rewards_B, groups, pad(mask_BT)), pad(wanted_BT))
        return
    wanted_BT = ADVANTAGES[name](rewards_BT, groups, mask_BT)
    same(ADVANTAGES[name](rewards_B, groups, mask_BT), wanted_BT)
    spoilt_BT = pad(rewards_BT.masked_fill(mask_BT == 0, float("nan")), fill=7.0)
    same(ADVANTAGES[name](spoilt_BT, groups, pad(mask_BT)), pad(wanted_BT))
    assert not (wanted_BT * (1 - mask_BT)).any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(batch=batches(), order=st.randoms(use_true_random=False))
@STEPS
def test_order_and_names_of_groups_do_not_change_advantages(name, batch, order):
    *_, mask_BT, rewards_B, groups = batch
    rows = list(range(len(groups)))
    order.shuffle(rows)
    renamed = [f"prompt {groups[row]}" for row in rows]
    wanted_BT = ADVANTAGES[name](rewards_B, torch.tensor(groups), mask_BT)[rows]
    same(ADVANTAGES[name](rewards_B[rows], renamed, mask_BT[rows]), wanted_BT)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "pass@k"])
@given(batch=batches())
@STEPS
def test_groups_may_stream_one_at_a_time(name, batch):
    """Barrier: group. No group's advantages depend on another's."""
    *_, mask_BT, rewards_B, groups = batch
    wanted_BT = GROUPED[name](rewards_B, groups, mask_BT)
    for group in set(groups):
        rows = [row for row, other in enumerate(groups) if other == group]
        same(GROUPED[name](rewards_B[rows], [group] * len(rows), mask_BT[rows]), wanted_BT[rows])


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_have_exactly_no_advantage(name):
    """Of sizes and values whose mean rounds to another number."""
    groups = [group for group in range(60) for _ in range(3 + group % 5)]
    rewards_B = torch.rand(60, generator=torch.Generator().manual_seed(0))[groups]
    assert not GROUPED[name](rewards_B, groups, torch.ones(len(groups), 2)).any()
