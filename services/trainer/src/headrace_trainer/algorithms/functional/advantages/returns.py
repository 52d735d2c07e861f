"""Advantages from rewards along time: GAE, REINFORCE++, ReMax, raw rewards; and whitening.

Shapes: B sequences, T tokens of a padded row. Rewards are (B, T) at tokens, or (B,) outcomes, which go to each
sequence's last trained token. Tokens outside the mask get advantage and return 0, their rewards and values are not
read, and time does not pass at them: in a trajectory of several turns the last token of one turn is followed by the
first of the next (verl's GAE does the same; OpenRLHF discounts through them). None of these carries a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.tensors import (
    bool_mask,
    masked,
    outcomes,
    per_token,
    token_rewards,
)

__all__ = [
    "Advantages",
    "discounted_returns",
    "gae_advantages",
    "raw_advantages",
    "reinforce_plus_plus_advantages",
    "remax_advantages",
    "whiten",
]


class Advantages(NamedTuple):
    """Advantages and the returns they come from, both (B, T), 0 outside the mask."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    correction: int = 1,
    variance_eps: float = 1e-8,
    std_eps: float = 0.0,
) -> Tensor:
    """(x - mean) / (sqrt(var + variance_eps) + std_eps) over all masked values; 0 outside the mask.

    Shapes: any, such as (B, T) tokens or (B,) sequences. Barrier: batch. Statistics are computed in float64.
    Convention (verl's `masked_whiten`): variance with n - 1 (`correction=1`) and 1e-8 inside the root. OpenRLHF and
    RLinf's REINFORCE++ use n (`correction=0`); RLinf's GAE `variance_eps=0, std_eps=1e-5`; TRL's RLOO
    `variance_eps=0, std_eps=1e-4`. `shift_mean=False` adds the mean back after scaling. Fewer than two values give a
    variance of 0, so a lone value becomes 0.
    """
    trained = bool_mask(mask, values)
    exact = masked(values, trained).double()
    count = trained.sum()
    mean = exact.sum() / count.clamp(min=1)
    centred = masked(exact - mean, trained)
    variance = centred.square().sum() / (count - correction).clamp(min=1)
    scaled = centred / ((variance + variance_eps).sqrt() + std_eps)
    return masked(scaled if shift_mean else scaled + mean, trained).to(values.dtype)


@torch.no_grad()
def gae_advantages(
    rewards: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values_B: Tensor | None = None,
    dones_BT: Tensor | None = None,
    discounts_BT: Tensor | None = None,
    whiten_advantages: bool = False,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), over the trained tokens t, t' of each sequence.

    delta_t = r_t + gamma V_t' - V_t;  A_t = delta_t + gamma lam A_t', with t' the trained token after t;
    return_t = A_t + V_t.

    Shapes: rewards (B, T) or (B,); values (B, T). Barrier: trajectory (batch with `whiten_advantages`).
    `bootstrap_values_B` is the value of what follows the last trained token: give it where the trajectory was
    truncated and 0 where it ended; none is 0 everywhere. `dones_BT` is true at the last token of an episode inside a
    row (environments that reset themselves): neither value nor advantage passes from the next episode. `discounts_BT`
    is what comes behind a token is worth to it beside gamma: less than 1 where a turn ends.
    Convention: not whitened (OpenRLHF); verl whitens inside the function, which `whiten_advantages` does with
    `whiten`'s defaults. verl leaves values at tokens outside the mask; here they are 0.
    """
    trained_BT = bool_mask(mask_BT, values_BT)
    rewards_BT = token_rewards(rewards, trained_BT).to(values_BT.dtype)
    kept_BT = masked(values_BT, trained_BT)
    going_BT = torch.ones_like(kept_BT) if dones_BT is None else (dones_BT == 0).to(kept_BT.dtype)
    if discounts_BT is not None:
        going_BT = going_BT * discounts_BT
    next_value_B = kept_BT.new_zeros(len(kept_BT)) if bootstrap_values_B is None else bootstrap_values_B
    next_advantage_B = kept_BT.new_zeros(len(kept_BT))
    advantages_BT = torch.zeros_like(kept_BT)
    for t in reversed(range(kept_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * going_BT[:, t] * next_value_B - kept_BT[:, t]
        advantage_B = delta_B + gamma * lam * going_BT[:, t] * next_advantage_B
        next_advantage_B = torch.where(trained_BT[:, t], advantage_B, next_advantage_B)
        next_value_B = torch.where(trained_BT[:, t], kept_BT[:, t], next_value_B)
        advantages_BT[:, t] = masked(advantage_B, trained_BT[:, t])
    returns_BT = advantages_BT + kept_BT
    return Advantages(whiten(advantages_BT, trained_BT) if whiten_advantages else advantages_BT, returns_BT)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + gamma R_t' over each sequence's trained tokens, (B, T). OpenRLHF's `get_cumulative_returns`."""
    trained_BT = mask_BT != 0
    rewards_BT = token_rewards(rewards, trained_BT)
    following_B = rewards_BT.new_zeros(len(rewards_BT))
    returns_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = rewards_BT[:, t] + gamma * following_B
        following_B = torch.where(trained_BT[:, t], return_B, following_B)
        returns_BT[:, t] = masked(return_B, trained_BT[:, t])
    return returns_BT


@torch.no_grad()
def reinforce_plus_plus_advantages(
    rewards: Tensor, mask_BT: Tensor, *, gamma: float = 1.0, correction: int = 1
) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over all trained tokens of the batch.

    A = whiten(R), R_t = r_t + gamma R_t'. Shapes: rewards (B, T), usually with a KL penalty inside (see
    `kl_penalised_rewards`), or (B,). Barrier: batch.
    Convention: variance with n - 1 (verl); RLinf and OpenRLHF use n (`correction=0`). verl starts the return anew
    after every masked token, so that in several turns an early turn learns nothing from a later one; here it does.
    """
    returns_BT = discounted_returns(rewards, mask_BT, gamma=gamma)
    return Advantages(whiten(returns_BT, mask_BT, correction=correction), returns_BT)


@torch.no_grad()
def remax_advantages(rewards: Tensor, baselines_B: Tensor, mask_BT: Tensor) -> Advantages:
    """ReMax (arXiv 2310.10505, algorithm 2): A_t = R_t - b, with b the reward of the prompt's greedy answer.

    Shapes: rewards (B, T) or (B,); baselines (B,). Barrier: trajectory (and its greedy answer). Convention: verl's;
    R_t is the undiscounted reward to come.
    """
    returns_BT = discounted_returns(rewards, mask_BT)
    return Advantages(masked(returns_BT - per_token(baselines_B, returns_BT), mask_BT != 0), returns_BT)


@torch.no_grad()
def raw_advantages(rewards: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """REINFORCE without a baseline: A = the sequence's reward, at each of its trained tokens.

    Shapes: rewards (B,) or (B, T), which are summed; the result is (B, T) with a mask or token rewards, else (B,).
    Barrier: trajectory. For rewards to come instead, use `discounted_returns`.
    """
    return spread(outcomes(rewards, mask_BT), rewards, mask_BT)


def spread(advantages_B: Tensor, rewards: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Sequence advantages at each trained token, (B, T); as they are, (B,), for (B,) rewards without a mask."""
    if mask_BT is None and rewards.dim() == 1:
        return advantages_B
    like_BT = rewards if mask_BT is None else mask_BT
    trained_BT = bool_mask(mask_BT, like_BT)
    return masked(per_token(advantages_B, like_BT), trained_BT)
