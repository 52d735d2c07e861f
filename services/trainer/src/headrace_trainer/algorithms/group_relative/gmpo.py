"""GMPO (arXiv 2507.20673): the geometric mean of an answer's clipped token ratios, times its advantage."""

from __future__ import annotations

from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.algorithms._policy_gradient import GroupRelative
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.sequence import gmpo_terms
from headrace_trainer.algorithms.plugins import Aggregation, GmpoOptions


class Gmpo(GroupRelative[GmpoOptions]):
    """GRPO's advantages; a mean over answers, whose tokens share their answer's loss equally."""

    whole_answers = "it has one ratio for all turns of a conversation"
    weighs_terms = True

    @property
    def aggregation(self) -> Aggregation:
        """Of terms that add up to an answer's loss."""
        return "seq-mean-token-sum"

    def terms(self, batch: TokenBatch) -> Terms:
        """The answer's loss, in equal parts; the correction is a part of its ratio."""
        correction = self.correction(batch)
        found = gmpo_terms(
            batch.padded(batch.log_probs_K),
            batch.padded(batch.old_log_probs_K),
            batch.padded(batch.advantages_K),
            batch.mask(),
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
            weights=None if correction is None else batch.padded(correction.weights_K),
        )
        return batch.flat_terms(found)
