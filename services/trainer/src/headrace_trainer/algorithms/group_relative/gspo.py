"""GSPO (arXiv 2507.18071): the clip acts on the ratio of a whole answer, exp of its tokens' mean log-ratio."""

from __future__ import annotations

from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.algorithms._policy_gradient import GroupRelative, bounds
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.sequence import gspo_terms
from headrace_trainer.algorithms.plugins import GspoOptions


class Gspo(GroupRelative[GspoOptions]):
    """GRPO's advantages under a sequence's ratio."""

    whole_answers = "it has one ratio for all turns of a conversation"

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
