"""SAPO (arXiv 2511.20347): a soft gate in place of the clip."""

from __future__ import annotations

from typing_extensions import override

from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.algorithms._policy_gradient import GroupRelative
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import sapo_terms
from headrace_trainer.algorithms.plugins import SapoOptions


class Sapo(GroupRelative[SapoOptions]):
    """GRPO's advantages under SAPO's gate."""

    @override
    def terms(self, batch: TokenBatch) -> Terms:
        return sapo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            tau_positive=self.options.tau_positive,
            tau_negative=self.options.tau_negative,
        )
