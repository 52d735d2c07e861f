"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms import _aggregation
from headrace_trainer.algorithms._base import Barrier, LossSums, TokenBatch
from headrace_trainer.algorithms._policy_loss import policy_objective, truncated_importance
from headrace_trainer.algorithms.plugins import GrpoOptions

# verl's convention: standard deviation with n - 1, this added to it.
STD_EPSILON = 1e-6


class Grpo:
    """A sample's advantage is its reward against its group; each step learns once from its own samples.

    Conventions of verl 0.9: see `advantages`.
    """

    barrier = Barrier.GROUP

    def __init__(self, options: GrpoOptions) -> None:
        self._options = options

    def advantages(self, rewards_GN: Tensor) -> Tensor:
        """(r - mean) / (std + 1e-6) in each group, std with n - 1; centred only when normalize_std is off.

        Dr. GRPO (arXiv 2503.20783) is the latter with `seq-mean-token-sum`. Equal rewards give exactly 0.
        """
        centred_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
        equal_G1 = (rewards_GN == rewards_GN[:, :1]).all(dim=1, keepdim=True)
        if self._options.normalize_std and rewards_GN.shape[1] > 1:
            centred_GN = centred_GN / (rewards_GN.std(dim=1, keepdim=True) + STD_EPSILON)
        return centred_GN.masked_fill(equal_G1, 0.0)

    def token_weight(self, tokens: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.token_weight(self._options.loss_aggregation, tokens)

    def denominator(self, tokens: int, sequences: int) -> float:
        """By `loss_aggregation`."""
        return _aggregation.denominator(self._options.loss_aggregation, tokens, sequences)

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum of the policy objective, importance-corrected when `importance_cap` is set."""
        loss_K = policy_objective(batch.log_probs_K, batch.advantages_K)
        cap = self._options.importance_cap
        if cap is not None:
            correction_K = truncated_importance(batch.log_probs_K, batch.engine_log_probs_K, cap)
            # A token without an engine log-prob has nothing to be corrected for.
            loss_K = loss_K * correction_K.nan_to_num(nan=1.0)
        return LossSums((loss_K * batch.weights_K).sum())
