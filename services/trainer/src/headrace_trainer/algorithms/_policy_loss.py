"""The clipped policy objective and the truncated importance correction, token by token (K tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# verl clamps the log-ratio before its exponential.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio: 1 - low to 1 + high, and `dual` for negative advantages (arXiv 1912.09729)."""

    low: float
    high: float
    dual: float | None = None


def policy_objective(log_ratio_K: Tensor, advantages_K: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(loss, whether the clip decided it), (K,) each: PPO's clipped objective (arXiv 1707.06347, eq. 7).

    At a ratio of 1 neither value nor gradient is clipped.
    """
    ratio_K = log_ratio_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free_K = -advantages_K * ratio_K
    bound_K = -advantages_K * ratio_K.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_K = torch.maximum(free_K, bound_K)
    clipped_K = bound_K > free_K
    if clip.dual is not None:
        most_K = -advantages_K * clip.dual
        over_K = (advantages_K < 0) & (loss_K > most_K)
        loss_K, clipped_K = torch.where(over_K, most_K, loss_K), clipped_K | over_K
    return loss_K, clipped_K


def approximate_kl(log_ratio_K: Tensor) -> Tensor:
    """(K,) exp(r) - 1 - r of r = log(p / p_old): Schulman's estimate of KL(old || new) on old samples, ≥ 0."""
    limited_K = log_ratio_K.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return limited_K.expm1() - limited_K


def truncated_importance(trainer_log_probs_K: Tensor, engine_log_probs_K: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap), detached: corrects the engine's numerics (TIS, Yao et al. 2025)."""
    log_ratio_K = (trainer_log_probs_K - engine_log_probs_K).detach()
    return log_ratio_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
