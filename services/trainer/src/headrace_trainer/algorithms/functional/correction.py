"""Importance weights and masks for samples that another policy, or the same policy in another engine, has drawn.

Shapes: B sequences, T tokens of a padded row. `log_probs` are the trainer's for the policy that sampled (old
log-probs), `sampler_log_probs` what the rollout engine reported. All results are detached, (B, T), and 0 outside the
mask; weights multiply a loss's tokens (`weights=`), masks replace its mask. Log-ratios are clamped to [-20, 20].
Barrier: trajectory (batch with `normalize`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.kl import KLEstimator, kl_estimate
from headrace_trainer.algorithms.functional.losses.policy import LOG_RATIO_LIMIT, log_ratio
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked, per_token, sequence_mean

__all__ = [
    "CorrectionLevel",
    "divergence_mask",
    "icepop_weights",
    "importance_ratios",
    "off_policy_sequence_mask",
    "ratio_mask",
    "truncated_importance_weights",
]

CorrectionLevel = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def importance_ratios(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    level: CorrectionLevel = "token",
) -> Tensor:
    """p / p_sampler: of each token; of the whole "sequence" (product); or its "geometric" mean."""
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    raw_BT = log_ratio(log_probs_BT, sampler_log_probs_BT, trained_BT, limit=None)
    if level == "sequence":
        raw_BT = per_token(raw_BT.sum(-1), raw_BT)
    elif level == "geometric":
        raw_BT = per_token(sequence_mean(raw_BT, trained_BT), raw_BT)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}: choose token, sequence or geometric")
    return masked(raw_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), trained_BT)


@torch.no_grad()
def truncated_importance_weights(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    low: float = 0.0,
    high: float = 2.0,
    level: CorrectionLevel = "token",
    normalize: bool = False,
) -> Tensor:
    """Truncated importance sampling (TIS; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"): clip(p / p_sampler, low, high).

    `normalize` divides by the mean weight: over tokens at level "token", else over sequences (verl).
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    ratio_BT = importance_ratios(log_probs_BT, sampler_log_probs_BT, trained_BT, level=level)
    weight_BT = masked(ratio_BT.clamp(low, high), trained_BT)
    if not normalize:
        return weight_BT
    if level == "token":
        mean = weight_BT.sum() / trained_BT.sum().clamp(min=1)
    else:
        mean = sequence_mean(weight_BT, trained_BT).sum() / trained_BT.any(-1).sum().clamp(min=1)
    return torch.where(mean > 1e-8, weight_BT / mean.clamp(min=1e-8), weight_BT)


@torch.no_grad()
def icepop_weights(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    low: float = 0.5,
    high: float = 5.0,
    level: CorrectionLevel = "token",
) -> Tensor:
    """IcePop (Ling team 2025, "Small leak can sink a great ship"): p / p_sampler within [low, high], else 0.

    Tokens outside keep their place in the loss's denominator (OpenRLHF, TRL); to drop them there too use `ratio_mask`.
    OpenRLHF's seq-mask-tis is `importance_ratios(...) * ratio_mask(..., level="geometric")`.
    """
    ratio_BT = importance_ratios(log_probs_BT, sampler_log_probs_BT, mask_BT, level=level)
    return masked(ratio_BT, (ratio_BT >= low) & (ratio_BT <= high))


@torch.no_grad()
def ratio_mask(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: CorrectionLevel = "token",
) -> Tensor:
    """Bool mask of the trained tokens with p / p_sampler within [low, high]."""
    ratio_BT = importance_ratios(log_probs_BT, sampler_log_probs_BT, mask_BT, level=level)
    return bool_mask(mask_BT, ratio_BT) & (ratio_BT >= low) & (ratio_BT <= high)


@torch.no_grad()
def divergence_mask(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    high: float,
    estimator: KLEstimator = "k3",
    reduce: Literal["token", "sum", "mean", "max"] = "token",
) -> Tensor:
    """Bool mask of the trained tokens whose estimate of KL(p_sampler || p) is at most `high` (verl's `rollout_rs`).

    Of each token, or reduced over each sequence, which is then kept or dropped whole.
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    kl_BT = kl_estimate(sampler_log_probs_BT, log_probs_BT, estimator, trained_BT, limit=None)
    if reduce == "sum":
        kl_BT = per_token(kl_BT.sum(-1), kl_BT)
    elif reduce == "mean":
        kl_BT = per_token(sequence_mean(kl_BT, trained_BT), kl_BT)
    elif reduce == "max":
        greatest_B = kl_BT.new_full((len(kl_BT), 1), float("-inf"))  # of a row without a token
        found_BT = torch.cat([kl_BT.masked_fill(~trained_BT, float("-inf")), greatest_B], -1)
        kl_BT = per_token(found_BT.amax(-1), kl_BT)
    elif reduce != "token":
        raise ValueError(f"unknown reduce {reduce!r}: choose token, sum, mean or max")
    return trained_BT & (kl_BT <= high)


@torch.no_grad()
def off_policy_sequence_mask(
    log_probs_BT: Tensor,
    sampler_log_probs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    high: float,
) -> Tensor:
    """DeepSeek-V3.2's sequence mask: a token is dropped if A < 0 and mean_t(log p_sampler - log p) > high."""
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    near_BT = divergence_mask(
        log_probs_BT, sampler_log_probs_BT, trained_BT, high=high, estimator="k1", reduce="mean"
    )
    return trained_BT & ((per_token(advantages, log_probs_BT) >= 0) | near_BT)
