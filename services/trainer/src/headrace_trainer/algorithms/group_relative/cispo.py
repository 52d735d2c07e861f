"""CISPO (MiniMax-M1, arXiv 2506.13585): a token's weight is clipped, and none loses its gradient."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import PolicyGradient, group_relative
from headrace_trainer.algorithms.functional import Terms, cispo_terms
from headrace_trainer.algorithms.plugins import CispoOptions


class Cispo(PolicyGradient[CispoOptions]):
    """GRPO's advantages under CISPO's weights."""

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's."""
        return group_relative(outcomes, self.options)

    def terms(self, batch: TokenBatch) -> Terms:
        """See `cispo_terms`."""
        return cispo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )
