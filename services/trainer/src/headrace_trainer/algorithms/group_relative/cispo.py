"""CISPO (MiniMax-M1, arXiv 2506.13585): a token's weight is clipped, and none loses its gradient."""

from __future__ import annotations

from typing_extensions import override

from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.algorithms._policy_gradient import GroupRelative
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import cispo_terms
from headrace_trainer.algorithms.plugins import CispoOptions


class Cispo(GroupRelative[CispoOptions]):
    """GRPO's advantages under CISPO's weights."""

    @override
    def terms(self, batch: TokenBatch) -> Terms:
        return cispo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )
