"""Policy losses that act on the few tokens whose log-prob and advantage vary together: clip-cov and KL-cov.

Shapes: B sequences, T tokens of a padded row; arguments common to all losses as in `policy`.
Barrier: batch. Covariances are against the means of the batch that is given: over micro-batches, each selects its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms, masked_mean
from headrace_trainer.algorithms.functional.losses.policy import log_ratio, ppo_terms, token_advantages
from headrace_trainer.algorithms.functional.tensors import bool_mask, masked

__all__ = ["clip_cov_terms", "kl_cov_terms", "token_covariances"]


@torch.no_grad()
def token_covariances(log_probs_BT: Tensor, advantages: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """(log p - mean log p)(A - mean A) of each trained token, (B, T); arXiv 2505.22617, eq. 10."""
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    advantage_BT = token_advantages(advantages, log_probs_BT, trained_BT)
    centred_BT = log_probs_BT - masked_mean(log_probs_BT, trained_BT)
    return masked(centred_BT * (advantage_BT - masked_mean(advantage_BT, trained_BT)), trained_BT)


def clip_cov_terms(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Terms:
    """Clip-Cov (arXiv 2505.22617, eq. 12): PPO's loss without a random few of the tokens of high covariance.

    max(1, floor(cov_fraction * trained tokens)) tokens are drawn, with `generator`, from those with covariance in
    (cov_low, cov_high) that PPO has not clipped; they add nothing to the loss but count in its denominator (verl).
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    terms = ppo_terms(
        log_probs_BT, old_log_probs_BT, advantages, trained_BT, clip_low=clip_low, clip_high=clip_high
    )
    cov_BT = token_covariances(log_probs_BT, advantages, trained_BT)
    open_BT = trained_BT & (terms.metrics["clip_fraction"] == 0) & (cov_BT > cov_low) & (cov_BT < cov_high)
    candidates_N = open_BT.flatten().nonzero()[:, 0]
    count = max(1, int(cov_fraction * int(trained_BT.sum())))
    # Drawn on the CPU, so that one generator serves every device.
    drawn_N = candidates_N[
        torch.randperm(len(candidates_N), generator=generator)[:count].to(candidates_N.device)
    ]
    dropped_BT = torch.zeros_like(open_BT).flatten().index_fill(0, drawn_N, True).view_as(open_BT)
    metrics = {**terms.metrics, "cov_clip_fraction": dropped_BT.float()}
    return Terms(masked(terms.loss, ~dropped_BT), metrics)


def kl_cov_terms(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor | None = None,
    *,
    cov_fraction: float = 2e-4,
    kl_coefficient: float = 1.0,
) -> Terms:
    """KL-Cov (arXiv 2505.22617, eq. 13): -A r, plus kl_coefficient |log r| at the tokens of highest covariance.

    max(1, floor(cov_fraction * trained tokens)) tokens are penalised; no clipping. Convention: verl's.
    """
    trained_BT = bool_mask(mask_BT, log_probs_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, trained_BT)
    advantage_BT = token_advantages(advantages, log_probs_BT, trained_BT)
    cov_BT = token_covariances(log_probs_BT, advantages, trained_BT).masked_fill(~trained_BT, float("-inf"))
    trained = int(trained_BT.sum())
    count = min(trained, max(1, int(cov_fraction * trained)))
    chosen_N = cov_BT.flatten().topk(count).indices
    chosen_BT = torch.zeros_like(trained_BT).flatten().index_fill(0, chosen_N, True).view_as(trained_BT)
    penalty_BT = kl_coefficient * masked(log_ratio_BT.abs(), chosen_BT)
    metrics = {"cov_kl_fraction": chosen_BT.float(), "approx_kl": -log_ratio_BT.detach()}
    return Terms(-advantage_BT * log_ratio_BT.exp() + penalty_BT, metrics)
