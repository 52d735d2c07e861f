"""Masks, groups and per-sequence means on plain tensors. Knows no algorithm.

Shapes: B sequences, T tokens of a padded row, G groups. A mask is 1 (or True) at trained tokens and 0 (or False) at
padding and at tokens that the policy did not sample, such as a tool's answer between two turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

__all__ = ["GroupIds", "group_index", "pad_sequences", "place_outcomes", "sequence_lengths", "sequence_mean"]

GroupIds = Tensor | Sequence[Hashable]


def bool_mask(mask_BT: Tensor | None, like_BT: Tensor) -> Tensor:
    """The mask as bool, all True for None. Raises ValueError when its shape is not that of `like_BT`."""
    if mask_BT is None:
        return torch.ones_like(like_BT, dtype=torch.bool)
    if mask_BT.shape != like_BT.shape:
        raise ValueError(
            f"the mask's shape {tuple(mask_BT.shape)} is not {tuple(like_BT.shape)}, the tokens' shape"
        )
    return mask_BT != 0


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values with 0 where the bool mask is False, NaN and infinity there included."""
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def per_token(values: Tensor, like_BT: Tensor) -> Tensor:
    """(B,), (B, 1) or (B, T) values as (B, T). Raises ValueError for any other shape."""
    if values.dim() == like_BT.dim() - 1:
        values = values.unsqueeze(-1)
    fits = values.shape[:-1] == like_BT.shape[:-1] and values.shape[-1] in (1, like_BT.shape[-1])
    if values.dim() != like_BT.dim() or not fits:
        raise ValueError(
            f"{tuple(values.shape)} values fit no {tuple(like_BT.shape)} tokens: give (B,) or (B, T)"
        )
    return values.expand_as(like_BT)


def as_float(values: Tensor) -> Tensor:
    """Integer and bool values as float32, others as they are."""
    return values if values.is_floating_point() else values.float()


def sequence_lengths(mask_BT: Tensor) -> Tensor:
    """Number of trained tokens of each sequence, (B,), int64."""
    return (mask_BT != 0).sum(-1)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over each sequence's trained tokens, (B,); 0 for a sequence that has none."""
    return masked(values_BT, mask_BT != 0).sum(-1) / sequence_lengths(mask_BT).clamp(min=1)


def group_index(groups: GroupIds, size: int, device: torch.device | None = None) -> tuple[Tensor, int]:
    """(group number of each sequence as (B,) int64, number of groups) from ids in any order.

    `groups` is an integer tensor or a list of anything hashable. Raises ValueError when its length is not `size`.
    """
    if len(groups) != size:
        raise ValueError(f"{len(groups)} group ids for {size} sequences: give one a sequence")
    if isinstance(groups, Tensor):
        ids_G, index_B = torch.unique(groups.to(device), return_inverse=True)
        return index_B, len(ids_G)
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(group, len(numbers)) for group in groups]
    return torch.tensor(index, dtype=torch.long, device=device), len(numbers)


def outcomes(rewards: Tensor, mask_BT: Tensor | None) -> Tensor:
    """One reward a sequence, (B,) floats: as given, or the sum of (B, T) token rewards at trained tokens."""
    rewards = as_float(rewards)
    if rewards.dim() == 1:
        return rewards
    return masked(rewards, bool_mask(mask_BT, rewards)).sum(-1)


def place_outcomes(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T) token rewards with each sequence's outcome at its last trained token.

    A sequence without a trained token gets no reward.
    """
    trained_BT = mask_BT != 0
    # Trained tokens from here to the end: 1 at the last one alone.
    left_BT = trained_BT.flip(-1).cumsum(-1).flip(-1)
    return masked(per_token(rewards_B, trained_BT), trained_BT & (left_BT == 1))


def token_rewards(rewards: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T) token rewards, 0 at tokens outside the bool mask; (B,) outcomes go to the last trained token."""
    rewards = as_float(rewards)
    return place_outcomes(rewards, mask_BT) if rewards.dim() == 1 else masked(rewards, mask_BT)


def pad_sequences(values_K: Tensor, lengths_B: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(values, mask), both (B, T), from the tokens of B sequences laid one after the other; differentiable.

    `padded[mask]` is the inverse. Raises ValueError when the lengths do not add up to K.
    """
    if sum(lengths_B) != len(values_K):
        raise ValueError(f"the lengths add up to {sum(lengths_B)}, not to the {len(values_K)} tokens given")
    lengths = torch.tensor(list(lengths_B), device=values_K.device)
    width = max(lengths_B, default=0)
    mask_BT = torch.arange(width, device=values_K.device) < lengths[:, None]
    padded_BT = values_K.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_K)
    return padded_BT, mask_BT
