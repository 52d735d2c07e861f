"""What the built-in algorithms share: aggregation, clipping, correction, figures. Each adds its advantages."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms import _aggregation
from headrace_trainer.algorithms._base import Barrier, LossSums, Passes, TokenBatch
from headrace_trainer.algorithms._policy_loss import (
    Clip,
    approximate_kl,
    policy_objective,
    truncated_importance,
)
from headrace_trainer.algorithms.plugins import ClipOptions


class ClippedPolicyGradient:
    """PPO's clipped objective, token by token, aggregated as the options say."""

    least_group = 1
    every_token = False

    def __init__(self, options: ClipOptions) -> None:
        self._policy = options

    compares = Barrier.GROUP
    """What the advantages need."""

    @property
    def barrier(self) -> Barrier:
        """What the advantages need, and the whole batch for several passes."""
        return Barrier.BATCH if self.passes.several else self.compares

    @property
    def passes(self) -> Passes:
        """By `epochs`, `minibatches` and `target_kl`."""
        return Passes(self._policy.epochs, self._policy.minibatches, self._policy.target_kl)

    def token_weight(self, tokens: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.token_weight(self._policy.loss_aggregation, tokens)

    def denominator(self, tokens: int, sequences: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.denominator(self._policy.loss_aggregation, tokens, sequences)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum of the clipped objective, importance-corrected when `importance_cap` is set."""
        options = self._policy
        log_ratio_K = batch.log_probs_K - batch.old_log_probs_K
        clip = Clip(options.clip_low, options.clip_high, options.dual_clip)
        loss_K, clipped_K = policy_objective(log_ratio_K, batch.advantages_K, clip)
        figures = {"clip_fraction": clipped_K.sum(), "approx_kl": approximate_kl(log_ratio_K).sum()}
        return LossSums((self._corrected(loss_K, batch) * batch.weights_K).sum(), figures)

    def _corrected(self, loss_K: Tensor, batch: TokenBatch) -> Tensor:
        cap = self._policy.importance_cap
        if cap is None:
            return loss_K
        correction_K = truncated_importance(batch.old_log_probs_K, batch.engine_log_probs_K, cap)
        # A token without an engine log-prob has nothing to be corrected for.
        return loss_K * correction_K.nan_to_num(nan=1.0)
