"""The clipped policy objective and the truncated importance correction, token by token (K tokens)."""

from __future__ import annotations

import torch
from torch import Tensor

# verl clamps the log-ratio before its exponential.
LOG_RATIO_LIMIT = 20.0


def clipped_objective(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate loss (arXiv 1707.06347, eq. 7) and which tokens it clips, both (K,).

    Dual-clipped for negative advantages (arXiv 1912.09729) as verl's `compute_policy_loss` always is:
    the loss of a token never exceeds `dual_clip` * |advantage|.
    """
    log_ratio_K = (log_probs_K - old_log_probs_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_K = log_ratio_K.exp()
    plain_K = -advantages_K * ratio_K
    clipped_K = -advantages_K * ratio_K.clamp(1 - clip_low, 1 + clip_high)
    loss_K = torch.maximum(plain_K, clipped_K)
    bounded_K = torch.minimum(-advantages_K * dual_clip, loss_K)
    return torch.where(advantages_K < 0, bounded_K, loss_K), clipped_K > plain_K


def truncated_importance(trainer_log_probs_K: Tensor, engine_log_probs_K: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap), detached: corrects the engine's numerics (TIS, Yao et al. 2025)."""
    log_ratio_K = (trainer_log_probs_K - engine_log_probs_K).detach()
    return log_ratio_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
