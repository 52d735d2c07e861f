"""Decoupled PPO: clip against a proximal policy, correct for the older policy that sampled.

Shapes: B sequences, T tokens of a padded row; arguments common to all losses as in `policy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import log_ratio, ppo_terms
from headrace_trainer.algorithms.functional.tensors import bool_mask

__all__ = ["behavior_mask", "decoupled_ppo_terms", "interpolated_log_probs"]


def decoupled_ppo_terms(
    log_probs: Tensor,
    proximal_log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Terms:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641, eq. 2; AReaL, arXiv 2505.24298, eq. 5).

    L_t = (p_prox / p_behav) PPO(p / p_prox, A): the proximal policy is a recent one (the step's weights before its
    first update), the behavior policy the one that sampled. Barrier: that of the advantages.
    With `behavior_mask` as the mask, tokens whose p_prox / p_behav exceeds a cap leave numerator and denominator, as
    in RLinf.

    Metrics of `ppo_terms` against the proximal policy, behavior_weight.
    """
    weight = log_ratio(proximal_log_probs, behavior_log_probs, mask).detach().exp()
    terms = ppo_terms(
        log_probs,
        proximal_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return Terms(terms.loss * weight, {**terms.metrics, "behavior_weight": weight})


@torch.no_grad()
def behavior_mask(
    proximal_log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor | None = None, *, cap: float
) -> Tensor:
    """Bool mask of the trained tokens with p_prox / p_behav <= cap, of the tokens' shape."""
    weight = log_ratio(proximal_log_probs, behavior_log_probs, mask).exp()
    return bool_mask(mask, weight) & (weight <= cap)


@torch.no_grad()
def interpolated_log_probs(
    log_probs: Tensor, behavior_log_probs: Tensor, versions: Tensor, current_version: int
) -> Tensor:
    """An estimate of the proximal log-probs where they were not computed (RLinf's, of the tokens' shape).

    log p_behav + a (log p - log p_behav), a = (current - 1 - version) / (current - version) within [0, 1]: linear in
    the policy version between the one that sampled a token and the current. `versions` is an integer tensor of the
    tokens' shape, or per sequence; a token of the current version, or with a negative one, has a = 0.
    """
    behind = (current_version - versions).to(log_probs.dtype)
    share = torch.where(
        (behind > 0) & (versions >= 0), (behind - 1) / behind.clamp(min=1), torch.zeros_like(behind)
    )
    while share.dim() < log_probs.dim():
        share = share.unsqueeze(-1)
    return behavior_log_probs + share.clamp(0, 1) * (log_probs - behavior_log_probs)
