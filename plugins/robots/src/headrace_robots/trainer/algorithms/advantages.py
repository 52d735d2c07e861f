"""Episodes of environments: chunks of actions, ends and time limits inside a row, and what follows a success.

Shapes: B environments, T chunks of a row (single actions where a chunk has one), C actions of a chunk. A row may hold
several episodes, one after the other. `valid` is true at actions that were executed. None carries a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from headrace_trainer.algorithms.functional.advantages.returns import Advantages, gae_advantages
from headrace_trainer.algorithms.functional.tensors import as_float, bool_mask, masked
from torch import Tensor

__all__ = ["chunk_rewards", "episode_advantages", "until_success_mask", "with_scores"]


@torch.no_grad()
def with_scores(
    rewards_BTC: Tensor, valid_BTC: Tensor, scores_B: Tensor, how: Literal["none", "add", "replace"]
) -> Tensor:
    """(B, T, C) what actions earn, for rows of one episode each: the environment's rewards, and each row's score at its
    last executed action, where `how` says so.
    """
    if how == "none":
        return rewards_BTC
    valid_BN = valid_BTC.flatten(1)
    last_BN = valid_BN & (valid_BN.flip(1).long().cumsum(1).flip(1) == 1)
    scored_BTC = (last_BN * scores_B[:, None]).view(rewards_BTC.shape)
    return scored_BTC if how == "replace" else rewards_BTC + scored_BTC


@torch.no_grad()
def chunk_rewards(rewards_BTC: Tensor, valid_BTC: Tensor) -> Tensor:
    """What a chunk's executed actions earned, (B, T); not discounted inside the chunk (RLinf's chunk level)."""
    rewards_BTC = as_float(rewards_BTC)
    return masked(rewards_BTC, bool_mask(valid_BTC, rewards_BTC)).sum(-1)


@torch.no_grad()
def episode_advantages(
    rewards_BT: Tensor,
    values_BT: Tensor,
    *,
    terminated_BT: Tensor,
    truncated_BT: Tensor,
    final_values_BT: Tensor,
    next_values_B: Tensor,
    mask_BT: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    whiten_advantages: bool = False,
) -> Advantages:
    """`gae_advantages` of rows in which environments reset themselves, with bootstrap at time limits.

    A step that terminated is worth nothing afterwards. One that was truncated alone is worth gamma times its
    `final_values_BT`, the critic's value of the observation that the cut episode ended with (not of the one that the
    next episode began with); they are not read elsewhere. In both the trace is cut. `next_values_B` is the value of
    what follows the row, where its last step did not end an episode. `gamma` is for one chunk.

    Barrier: trajectory (batch with `whiten_advantages`).
    """
    terminated_BT, truncated_BT = terminated_BT != 0, truncated_BT != 0
    cut_BT = truncated_BT & ~terminated_BT
    bootstrapped_BT = as_float(rewards_BT) + gamma * masked(final_values_BT, cut_BT)
    found: Advantages = gae_advantages(
        bootstrapped_BT,
        values_BT,
        mask_BT,
        gamma=gamma,
        lam=lam,
        bootstrap_values_B=next_values_B,
        dones_BT=terminated_BT | truncated_BT,
        whiten_advantages=whiten_advantages,
    )
    return found


@torch.no_grad()
def until_success_mask(success: Tensor, valid: Tensor | None = None) -> Tensor:
    """Bool mask of the steps up to and with the first success, (B, T) or (B, T, C), for rows of one episode each.

    What a policy does after it succeeded, while the episode goes on to its horizon, teaches nothing (RLinf masks it
    too). A row without a success keeps all its valid steps; a success at a step that is not valid does not count.
    """
    valid_all = bool_mask(valid, success)
    succeeded_BK = (valid_all & (success != 0)).flatten(1).long()
    before_BK = succeeded_BK.cumsum(-1) - succeeded_BK
    return valid_all & (before_BK == 0).view(success.shape)
