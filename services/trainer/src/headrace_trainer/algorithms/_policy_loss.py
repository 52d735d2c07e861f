"""The policy objective and the truncated importance correction, token by token (K tokens)."""

from __future__ import annotations

from torch import Tensor

# verl clamps the log-ratio before its exponential.
LOG_RATIO_LIMIT = 20.0


def policy_objective(log_probs_K: Tensor, advantages_K: Tensor) -> Tensor:
    """-advantage * p / p(detached), (K,): the policy gradient of one step on its own samples.

    The ratio is exactly 1, so PPO's clipping (arXiv 1707.06347, eq. 7) would change neither value nor gradient.
    """
    return -advantages_K * (log_probs_K - log_probs_K.detach()).exp()


def truncated_importance(trainer_log_probs_K: Tensor, engine_log_probs_K: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap), detached: corrects the engine's numerics (TIS, Yao et al. 2025)."""
    log_ratio_K = (trainer_log_probs_K - engine_log_probs_K).detach()
    return log_ratio_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
