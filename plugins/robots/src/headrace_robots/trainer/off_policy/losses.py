"""Targets and losses of learning off policy, as means over a batch. Knows no network, no store and no ranks.

Shapes: B transitions, E critics, K categories. Every loss takes `weights_B`, 1 unless draws are prioritised, and
`count`, what the sum over this rank's part of the batch is divided by. Targets have no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean(losses_B: Tensor, count: float) -> Tensor:
    """This rank's part of the batch's mean."""
    return losses_B.sum() / count


@torch.no_grad()
def bootstrapped(rewards_B: Tensor, discounts_B: Tensor, next_values_B: Tensor) -> Tensor:
    """Rewards and the discounted value of what follows; 0 discounts are ends."""
    return rewards_B + discounts_B * next_values_B


@torch.no_grad()
def soft_values(next_EB: Tensor, log_probs_B: Tensor, temperature: Tensor) -> Tensor:
    """(B,) the least of the critics' values, less what its log-prob weighs (SAC)."""
    return next_EB.amin(0) - temperature * log_probs_B


def soft_values_of_categories(
    values_EBK: Tensor, log_probs_BK: Tensor, temperature: Tensor, how: str = "least"
) -> Tensor:
    """(B,) expected over the categories (arXiv 1910.07207)."""
    values_BK = values_EBK.amin(0) if how == "least" else values_EBK.mean(0)
    return (log_probs_BK.exp() * (values_BK - temperature * log_probs_BK)).sum(-1)


def critic_loss(values_EB: Tensor, targets_B: Tensor, weights_B: Tensor, count: float) -> Tensor:
    """Half the squared temporal differences, added up over the critics (SAC, CrossQ); TD3's is twice as large."""
    return 0.5 * mean((weights_B * (values_EB - targets_B).square()).sum(0), count)


def temperature_loss(
    log_temperature: Tensor, log_probs_B: Tensor, target_entropy: float, count: float
) -> Tensor:
    """Raises the temperature where the entropy is below its target."""
    return -mean(log_temperature * (log_probs_B + target_entropy).detach(), count)


def soft_actor_loss(
    values_EB: Tensor, log_probs_B: Tensor, temperature: Tensor, count: float, how: str = "least"
) -> Tensor:
    """Raises the least, or the mean, of the critics' values and the entropy."""
    values_B = values_EB.amin(0) if how == "least" else values_EB.mean(0)
    return mean(temperature * log_probs_B - values_B, count)


def td3_bc_actor_loss(
    values_B: Tensor, errors_B: Tensor, alpha: float | None, count: float, scale: Tensor
) -> Tensor:
    """TD3's without `alpha`; else the value by `alpha / scale` against the squared error of imitation.

    `scale` is the mean absolute value over the whole batch; `errors_B` are means over an action's numbers.
    """
    if alpha is None:
        return -mean(values_B, count)
    return mean(errors_B - alpha / scale * values_B, count)


def expectile_loss(differences_B: Tensor, expectile: float, weights_B: Tensor, count: float) -> Tensor:
    """Of how far a value lies below what it should be: those above count `expectile`, those below 1 less it (IQL)."""
    side_B = torch.where(differences_B > 0, expectile, 1 - expectile)
    return mean(weights_B * side_B * differences_B.square(), count)


@torch.no_grad()
def advantage_weights(advantages_B: Tensor, inverse_temperature: float, most: float) -> Tensor:
    """What each action is imitated with (IQL, AWR)."""
    return (inverse_temperature * advantages_B).exp().clamp(max=most)
