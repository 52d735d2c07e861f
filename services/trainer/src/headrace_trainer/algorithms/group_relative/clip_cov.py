"""GRPO with Clip-Cov or KL-Cov (arXiv 2505.22617): few tokens of high covariance are held back, to keep the entropy.

Covariances are those of the old log-probs and the advantages over the step's whole batch, so that micro-batches and
passes see one choice of tokens; verl takes the log-probs of the moment, within each micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, RETURNS, Barrier, Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, GroupRelative
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.covariance import token_covariances
from headrace_trainer.algorithms.functional.losses.policy import log_ratio
from headrace_trainer.algorithms.plugins import ClipCovOptions, KlCovOptions


class ClipCov(GroupRelative[ClipCovOptions], ClippedPolicyGradient[ClipCovOptions]):
    """A random few of the tokens whose covariance lies within bounds have no advantage."""

    compares = Barrier.BATCH

    @property
    def columns(self) -> tuple[str, ...]:
        """Old log-probs in any case: covariances are made of them."""
        return tuple(dict.fromkeys((OLD_LOG_PROBS, *super().columns)))

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's, 0 at the tokens that are drawn: max(1, floor(cov_fraction * trained tokens)) of them at most."""
        chosen, mask_BT = self.options, outcomes.mask_BT
        advantages_BT = self.group_relative(outcomes)
        cov_BT = token_covariances(outcomes.columns_BT[OLD_LOG_PROBS], advantages_BT, mask_BT)
        open_BT = mask_BT & (cov_BT > chosen.cov_low) & (cov_BT < chosen.cov_high)
        candidates_N = open_BT.flatten().nonzero()[:, 0]
        generator = torch.Generator().manual_seed(outcomes.draw)
        order_N = torch.randperm(len(candidates_N), generator=generator)
        drawn_N = candidates_N[order_N[: _count(chosen.cov_fraction, mask_BT)]]
        return advantages_BT.flatten().index_fill(0, drawn_N, 0.0).view_as(advantages_BT)


class KlCov(GroupRelative[KlCovOptions]):
    """The tokens of the highest covariance pay for their distance from the old policy; nothing is clipped."""

    compares = Barrier.BATCH

    @property
    def columns(self) -> tuple[str, ...]:
        """As `ClipCov.columns`."""
        return tuple(dict.fromkeys((OLD_LOG_PROBS, *super().columns)))

    def advantages(self, outcomes: Outcomes) -> Advantages:
        """GRPO's; 1 among the returns where a token pays."""
        mask_BT = outcomes.mask_BT
        advantages_BT = self.group_relative(outcomes)
        cov_BT = token_covariances(outcomes.columns_BT[OLD_LOG_PROBS], advantages_BT, mask_BT)
        ranked_N = cov_BT.masked_fill(~mask_BT, float("-inf")).flatten()
        count = min(int(mask_BT.sum()), _count(self.options.cov_fraction, mask_BT))
        paying_BT = torch.zeros_like(ranked_N).index_fill(0, ranked_N.topk(count).indices, 1.0)
        return Advantages(advantages_BT, paying_BT.view_as(advantages_BT))

    def terms(self, batch: TokenBatch) -> Terms:
        """-A r, plus cov_coef |log r| where a token pays."""
        log_ratio_K = log_ratio(batch.log_probs_K, batch.old_log_probs_K)
        penalty_K = self.options.cov_coef * log_ratio_K.abs() * batch.columns_K[RETURNS]
        return Terms(-batch.advantages_K * log_ratio_K.exp() + penalty_K, {})


def _count(fraction: float, mask_BT: Tensor) -> int:
    return max(1, int(fraction * int(mask_BT.sum())))
