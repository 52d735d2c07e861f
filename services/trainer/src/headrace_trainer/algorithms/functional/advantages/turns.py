"""Rewards by turn of conversations. Shapes: B sequences, N turns of the one that has most, T tokens of a padded row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Placed", "place_turns", "turn_returns"]


class Placed(NamedTuple):
    """Rewards and discounts at tokens, both (B, T): rewards 0 and discounts 1 where no turn ends."""

    rewards: Tensor
    discounts: Tensor


@torch.no_grad()
def turn_returns(rewards_BN: Tensor, discount: float = 1.0) -> Tensor:
    """G_k = r_k + discount G_{k+1}, (B, N). Barrier: trajectory. Rewards behind a sequence's last turn are 0."""
    returns_BN = torch.zeros_like(rewards_BN)
    following_B = rewards_BN.new_zeros(len(rewards_BN))
    for turn in reversed(range(rewards_BN.shape[1])):
        following_B = rewards_BN[:, turn] + discount * following_B
        returns_BN[:, turn] = following_B
    return returns_BN


@torch.no_grad()
def place_turns(
    rewards_BN: Tensor, tokens_BN: Tensor, counts_B: Tensor, mask_BT: Tensor, discount: float = 1.0
) -> Placed:
    """Each turn's reward at its last token, and what a reward behind that token is discounted by.

    `tokens_BN` are the turns' tokens, `counts_B` says how many turns there are. A turn without a token, of which a stop
    string has left nothing, ends at the token before it, with its reward discounted once; before the first token there
    is nothing that could earn a reward, and it is left out.
    """
    ends_BN = tokens_BN.cumsum(1)
    there_BN = (torch.arange(rewards_BN.shape[1]) < counts_B[:, None]) & (ends_BN > 0)
    # How many turns before it have the same end.
    behind_BN = torch.arange(rewards_BN.shape[1]) - torch.searchsorted(ends_BN, ends_BN)
    sample_U, turn_U = there_BN.nonzero(as_tuple=True)
    token_U = ends_BN[sample_U, turn_U] - 1
    rewards_U = rewards_BN[sample_U, turn_U] * discount ** behind_BN[sample_U, turn_U]
    zeros_BT = rewards_BN.new_zeros(mask_BT.shape)
    fits_U = token_U < mask_BT.shape[1]  # A sequence that carries no loss has no tokens here.
    at = (sample_U[fits_U], token_U[fits_U])
    placed_BT = zeros_BT.index_put(at, rewards_U[fits_U], accumulate=True)
    turns_BT = zeros_BT.index_put(at, torch.ones_like(rewards_U[fits_U]), accumulate=True)
    kept_BT = mask_BT != 0
    return Placed(placed_BT * kept_BT, torch.where(kept_BT, discount**turns_BT, 1.0))
