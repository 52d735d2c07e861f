"""Rewards and masks changed by length or by what a group has to teach.

Shapes: B sequences, T tokens of a padded row. Nothing here carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.tensors import GroupIds, as_float, group_index

__all__ = ["drop_truncated", "informative_groups", "overlong_penalty", "truncation_penalty"]


def overlong_penalty(lengths_B: Tensor, max_length: int, buffer: int, *, factor: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), (B,), in [-factor, 0]: add it to the rewards.

    0 up to max_length - buffer tokens, then linear to -factor at max_length and beyond (verl does not stop at -factor;
    lengths beyond max_length do not occur there). Barrier: trajectory. Raises ValueError unless
    0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer ({buffer}) must be above 0 and at most max_length ({max_length})")
    over_B = (lengths_B - (max_length - buffer)).clamp(0, buffer)
    return -over_B / buffer * factor


def truncation_penalty(rewards_B: Tensor, truncated_B: Tensor, *, coefficient: float) -> Tensor:
    """Rewards with those of truncated sequences times `coefficient` in [0, 1], or set to it if negative, (B,).

    ProRL's "stop properly" penalty, as OpenRLHF has it. Barrier: trajectory. Raises ValueError for more than 1.
    """
    if coefficient > 1:
        raise ValueError(
            f"coefficient ({coefficient}) scales by at most 1; a negative one is the reward itself"
        )
    changed_B = rewards_B * coefficient if coefficient >= 0 else torch.full_like(rewards_B, coefficient)
    return torch.where(truncated_B.bool(), changed_B, rewards_B)


def informative_groups(rewards_B: Tensor, groups: GroupIds, *, tolerance: float = 0.0) -> Tensor:
    """True for sequences of groups whose rewards differ by more than `tolerance`, (B,) bool. Barrier: group.

    DAPO's dynamic sampling (arXiv 2503.14476, eq. 11) keeps only these: a group of equal rewards has no advantage.
    """
    rewards_B = as_float(rewards_B)
    index_B, count = group_index(groups, len(rewards_B), rewards_B.device)
    empty_G = rewards_B.new_zeros(count)
    highest_G = empty_G.scatter_reduce(0, index_B, rewards_B, "amax", include_self=False)
    lowest_G = empty_G.scatter_reduce(0, index_B, rewards_B, "amin", include_self=False)
    return (highest_G - lowest_G > tolerance)[index_B]


def drop_truncated(mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """The mask as bool without the tokens of truncated sequences (DAPO's overlong filtering), (B, T)."""
    return (mask_BT != 0) & ~truncated_B.bool()[:, None]
