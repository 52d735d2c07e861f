"""Advantages of a sequence against the other sequences of its prompt.

Shapes: B sequences, T tokens of a padded row, G groups. Rewards are (B,) outcomes, or (B, T) token rewards, which are
summed over the trained tokens. `groups` names each sequence's group, a (B,) tensor or a list of anything hashable, in
any order and of any sizes. The result is (B, T) and 0 outside the mask when a mask or token rewards are given, and
(B,) for outcomes alone. None carries a gradient. Barrier: group, where not said otherwise.

A group whose rewards are all equal has advantage exactly 0. `singletons` says what a group of one means: "refuse"
(ValueError, the default), "zero", or "raw" (its reward, as verl).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.advantages.returns import spread, whiten
from headrace_trainer.algorithms.functional.tensors import GroupIds, group_index, outcomes, sequence_lengths

__all__ = [
    "Singletons",
    "dr_grpo_advantages",
    "gpg_advantages",
    "grpo_advantages",
    "opo_advantages",
    "passk_grpo_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
]

Singletons = Literal["refuse", "zero", "raw"]


@torch.no_grad()
def grpo_advantages(
    rewards: Tensor,
    groups: GroupIds,
    mask_BT: Tensor | None = None,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-6,
    correction: int = 1,
    singletons: Singletons = "refuse",
) -> Tensor:
    """GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): A = (r - mean) / (std + eps) within the group.

    Convention: std with n - 1 and eps 1e-6 added to it (verl, RLinf); OpenRLHF adds 1e-9, TRL 1e-4. `scale="batch"`
    divides by the std of all rewards of the batch (TRL's `scale_rewards`; barrier: batch); "none" only centres
    (Dr. GRPO). A lone "raw" reward is not scaled by its group.
    """
    reward_B, group = _grouped(rewards, groups, mask_BT)
    advantages_B = _centred(reward_B, group, singletons)
    if scale == "batch":
        batch = _Groups(torch.zeros_like(group.index_B), 1, torch.full_like(group.size_B, len(reward_B)))
        advantages_B = advantages_B / (_std(reward_B, batch, correction) + eps)
    elif scale == "group":
        std_B = _std(reward_B, group, correction)
        advantages_B = torch.where(group.size_B > 1, advantages_B / (std_B + eps), advantages_B)
    elif scale != "none":
        raise ValueError(f"unknown scale {scale!r}: choose group, batch or none")
    return spread(advantages_B, rewards, mask_BT)


def dr_grpo_advantages(
    rewards: Tensor, groups: GroupIds, mask_BT: Tensor | None = None, *, singletons: Singletons = "refuse"
) -> Tensor:
    """Dr. GRPO (arXiv 2503.20783): A = r - mean. Its loss is aggregated by `seq-mean-token-sum-norm`."""
    return grpo_advantages(rewards, groups, mask_BT, scale="none", singletons=singletons)


@torch.no_grad()
def rloo_advantages(
    rewards: Tensor, groups: GroupIds, mask_BT: Tensor | None = None, *, singletons: Singletons = "refuse"
) -> Tensor:
    """RLOO (arXiv 2402.14740, eq. 8): A = r - mean of the group's other rewards = n / (n - 1) (r - mean)."""
    reward_B, group = _grouped(rewards, groups, mask_BT)
    size_B = group.size_B.to(reward_B.dtype)
    factor_B = size_B / (size_B - 1).clamp(min=1)
    return spread(_centred(reward_B, group, singletons) * factor_B, rewards, mask_BT)


@torch.no_grad()
def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    groups: GroupIds,
    mask_BT: Tensor,
    *,
    correction: int = 1,
    singletons: Singletons = "refuse",
) -> Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262): r - mean of the group, then whitened over the batch's tokens.

    Shapes: the mask is needed; the result is (B, T). Barrier: batch. Convention: verl's, each sequence weighs its
    trained tokens and the variance has n - 1; RLinf and OpenRLHF use n (`correction=0`).
    """
    reward_B, group = _grouped(rewards, groups, mask_BT)
    advantages_BT = spread(_centred(reward_B, group, singletons), rewards, mask_BT)
    return whiten(advantages_BT, mask_BT, correction=correction)


@torch.no_grad()
def opo_advantages(
    rewards: Tensor, groups: GroupIds, mask_BT: Tensor, *, singletons: Singletons = "refuse"
) -> Tensor:
    """OPO (arXiv 2505.23585, eq. 8): A = r - sum(l r) / sum(l), l the number of trained tokens of a sequence.

    The mask is needed: it gives the lengths. A group without a trained token has advantage 0.
    """
    reward_B, group = _grouped(rewards, groups, mask_BT)
    length_B = sequence_lengths(mask_BT).to(reward_B.dtype)
    weight_G = _sums(length_B, group)
    baseline_G = _sums(length_B * reward_B, group) / weight_G.clamp(min=1)
    advantages_B = _exact(reward_B - baseline_G[group.index_B], reward_B, group, singletons)
    return spread(advantages_B, rewards, mask_BT)


@torch.no_grad()
def gpg_advantages(
    rewards: Tensor,
    groups: GroupIds,
    mask_BT: Tensor | None = None,
    *,
    alpha: float | None = None,
    norm: float = 1.0,
    singletons: Singletons = "refuse",
) -> Tensor:
    """GPG (arXiv 2504.02546, eq. 6): A = alpha (r - mean) / norm; its loss is `reinforce_terms`.

    `alpha` None is B / (number of sequences whose reward is not 0), as verl: barrier batch; with a number: group.
    """
    reward_B, group = _grouped(rewards, groups, mask_BT)
    factor = len(reward_B) / max(1, int(torch.count_nonzero(reward_B))) if alpha is None else alpha
    return spread(_centred(reward_B, group, singletons) * (factor / norm), rewards, mask_BT)


@torch.no_grad()
def passk_grpo_advantages(
    rewards: Tensor,
    groups: GroupIds,
    mask_BT: Tensor | None = None,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Pass@k GRPO (arXiv 2503.19595): the group's best sequence gets r_max - r_second (/ (std + eps)), others 0.

    Convention: verl's, std with n - 1. A tie for the best has advantage 0. Raises ValueError for a group of one.
    """
    reward_B, group = _grouped(rewards, groups, mask_BT)
    _check_singletons(group, "refuse")
    best_G = _extreme(reward_B, group, "amax")
    is_best_B = reward_B == best_G[group.index_B]
    ties_G = _sums(is_best_B.to(reward_B.dtype), group)
    second_G = _extreme(reward_B.masked_fill(is_best_B, float("-inf")), group, "amax")
    lead_G = torch.where(ties_G > 1, torch.zeros_like(best_G), best_G - second_G)
    advantages_B = torch.where(is_best_B, lead_G[group.index_B], torch.zeros_like(reward_B))
    if normalize_std:
        advantages_B = advantages_B / (_std(reward_B, group, 1) + eps)
    return spread(advantages_B, rewards, mask_BT)


class _Groups(NamedTuple):
    index_B: Tensor
    number: int
    size_B: Tensor


def _grouped(rewards: Tensor, groups: GroupIds, mask_BT: Tensor | None) -> tuple[Tensor, _Groups]:
    reward_B = outcomes(rewards, mask_BT)
    index_B, number = group_index(groups, len(reward_B), reward_B.device)
    return reward_B, _Groups(index_B, number, torch.bincount(index_B, minlength=number)[index_B])


def _sums(values_B: Tensor, group: _Groups) -> Tensor:
    return values_B.new_zeros(group.number).index_add(0, group.index_B, values_B)


def _extreme(values_B: Tensor, group: _Groups, which: str) -> Tensor:
    empty_G = values_B.new_zeros(group.number)
    return empty_G.scatter_reduce(0, group.index_B, values_B, which, include_self=False)


def _centred(reward_B: Tensor, group: _Groups, singletons: Singletons) -> Tensor:
    mean_B = _sums(reward_B, group)[group.index_B] / group.size_B
    return _exact(reward_B - mean_B, reward_B, group, singletons)


def _exact(centred_B: Tensor, reward_B: Tensor, group: _Groups, singletons: Singletons) -> Tensor:
    """Exactly 0 in groups of equal rewards, where rounding would leave more; `singletons` in groups of one."""
    _check_singletons(group, singletons)
    spread_G = _extreme(reward_B, group, "amax") - _extreme(reward_B, group, "amin")
    centred_B = centred_B.masked_fill((spread_G == 0)[group.index_B], 0.0)
    return torch.where(group.size_B == 1, reward_B, centred_B) if singletons == "raw" else centred_B


def _check_singletons(group: _Groups, singletons: Singletons) -> None:
    if singletons not in ("refuse", "zero", "raw"):
        raise ValueError(f"unknown singletons {singletons!r}: choose refuse, zero or raw")
    if singletons == "refuse" and bool((group.size_B == 1).any()):
        raise ValueError(
            "a group of one has no other sequence to compare with: sample more, or choose singletons"
        )


def _std(reward_B: Tensor, group: _Groups, correction: int) -> Tensor:
    """Standard deviation of each sequence's group, (B,); 0 for a group of one."""
    mean_B = _sums(reward_B, group)[group.index_B] / group.size_B
    squares_B = _sums((reward_B - mean_B).square(), group)[group.index_B]
    return (squares_B / (group.size_B - correction).clamp(min=1)).sqrt()
