"""GSPO (arXiv 2507.18071): the clip acts on the ratio of a whole answer, exp of its tokens' mean log-ratio."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import PolicyGradient, bounds, group_relative
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.sequence import gspo_terms
from headrace_trainer.algorithms.plugins import GspoOptions


class Gspo(PolicyGradient[GspoOptions]):
    """GRPO's advantages under a sequence's ratio."""

    least_group = 2
    whole_answers = "it has one ratio for all turns of a conversation"

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's."""
        return group_relative(outcomes, self.options)

    def terms(self, batch: TokenBatch) -> Terms:
        """The sequence's, for each of its tokens."""
        found = gspo_terms(
            batch.padded(batch.log_probs_K),
            batch.padded(batch.old_log_probs_K),
            batch.padded(batch.advantages_K),
            batch.mask(),
            **bounds(self.options),
        )
        return batch.flat_terms(found)
