"""SAPO (arXiv 2511.20347): a soft gate in place of the clip."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import PolicyGradient, group_relative
from headrace_trainer.algorithms.functional import Terms, sapo_terms
from headrace_trainer.algorithms.plugins import SapoOptions


class Sapo(PolicyGradient[SapoOptions]):
    """GRPO's advantages under SAPO's gate."""

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's."""
        return group_relative(outcomes, self.options)

    def terms(self, batch: TokenBatch) -> Terms:
        """See `sapo_terms`."""
        return sapo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            tau_positive=self.options.tau_positive,
            tau_negative=self.options.tau_negative,
        )
