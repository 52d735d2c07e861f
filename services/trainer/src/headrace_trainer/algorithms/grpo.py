"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL."""

from __future__ import annotations

from headrace_schema.learning import AlgorithmSection
from torch import Tensor

from headrace_trainer.algorithms import _aggregation, register
from headrace_trainer.algorithms._base import Barrier, LossSums, TokenBatch
from headrace_trainer.algorithms._policy_loss import clipped_objective, truncated_importance

# verl's convention: standard deviation with n - 1, this added to it.
STD_EPSILON = 1e-6


@register("grpo")
class Grpo:
    """A sample's advantage is its reward against its group; the objective is PPO's clipped one.

    Conventions of verl 0.9: see `advantages` and `clipped_objective`.
    """

    barrier = Barrier.GROUP

    def __init__(self, config: AlgorithmSection) -> None:
        self._config = config

    def advantages(self, rewards_GN: Tensor) -> Tensor:
        """(r - mean) / (std + 1e-6) in each group, std with n - 1; centred only when normalize_std is off.

        Dr. GRPO (arXiv 2503.20783) is the latter with `seq-mean-token-sum`. Equal rewards give exactly 0.
        """
        centred_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
        equal_G1 = (rewards_GN == rewards_GN[:, :1]).all(dim=1, keepdim=True)
        if self._config.normalize_std and rewards_GN.shape[1] > 1:
            centred_GN = centred_GN / (rewards_GN.std(dim=1, keepdim=True) + STD_EPSILON)
        return centred_GN.masked_fill(equal_G1, 0.0)

    def token_weight(self, tokens: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.token_weight(self._config.loss_aggregation, tokens)

    def denominator(self, tokens: int, sequences: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.denominator(self._config.loss_aggregation, tokens, sequences)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum of the clipped objective, importance-corrected when `importance_cap` is set."""
        config = self._config
        old_K = batch.log_probs_K.detach() if batch.old_log_probs_K is None else batch.old_log_probs_K
        loss_K, clipped_K = clipped_objective(
            batch.log_probs_K, old_K, batch.advantages_K, clip_low=config.clip_low, clip_high=config.clip_high
        )
        if config.importance_cap is not None:
            correction_K = truncated_importance(old_K, batch.engine_log_probs_K, config.importance_cap)
            # A token without an engine log-prob has nothing to be corrected for.
            loss_K = loss_K * correction_K.nan_to_num(nan=1.0)
        return LossSums((loss_K * batch.weights_K).sum(), {"clip_fraction": clipped_K.float().sum()})
