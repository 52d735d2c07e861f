"""GRPO and its relatives: an answer's advantage is its reward compared with its group's, clipped by ratios."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, RETURNS, Barrier, Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, GroupRelative, bounds
from headrace_trainer.algorithms.functional.advantages.groups import dr_grpo_advantages, passk_grpo_advantages
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.covariance import token_covariances
from headrace_trainer.algorithms.functional.losses.policy import cispo_terms, log_ratio, sapo_terms
from headrace_trainer.algorithms.functional.losses.sequence import gmpo_terms, gspo_terms
from headrace_trainer.algorithms.functional.shaping import overlong_penalty
from headrace_trainer.algorithms.plugins import (
    Aggregation,
    CispoOptions,
    ClipCovOptions,
    DapoOptions,
    DrGrpoOptions,
    GmpoOptions,
    GrpoOptions,
    GspoOptions,
    KlCovOptions,
    SapoOptions,
)


class Grpo(GroupRelative[GrpoOptions], ClippedPolicyGradient[GrpoOptions]):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL.

    A sample's advantage is its reward against its group.
    """


class PassKGrpo(ClippedPolicyGradient[GrpoOptions]):
    """Pass@k GRPO (arXiv 2503.19595): what counts is the best of a group's answers.

    The best sample of a group has its lead over the second, the others nothing.
    """

    least_group = 2
    whole_answers = "what counts is the best of whole answers"

    @override
    def advantages(self, outcomes: Outcomes) -> Tensor:
        found_BT: Tensor = passk_grpo_advantages(
            outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT, normalize_std=self.options.normalize_std
        )
        return found_BT


class DrGrpo(ClippedPolicyGradient[DrGrpoOptions]):
    """Dr. GRPO (arXiv 2503.20783): centred rewards, token sums over a constant instead of each answer's length.

    The loss is the mean over answers of their token sums, divided by `norm_length`.
    """

    least_group = 2

    @property
    def aggregation(self) -> Aggregation:
        """The paper's."""
        return "seq-mean-token-sum"

    def token_weight(self, tokens: int) -> float:
        """The same for every token of every answer."""
        return 1.0 / self.options.norm_length

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group."""
        found_BT: Tensor = dr_grpo_advantages(outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT


class Dapo(GroupRelative[DapoOptions], ClippedPolicyGradient[DapoOptions]):
    """DAPO (arXiv 2503.14476): clip-higher, mean over tokens, dynamic sampling, overlong shaping.

    GRPO's advantages of shaped rewards.

    Dynamic sampling is the coordinator's: it drops groups of equal rewards and takes the next ones, as `refill` says.
    It judges the scorers' rewards, before they are shaped. Overlong filtering is `algorithm.truncated: mask`.
    """

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's, of rewards that sink over the last `overlong_buffer` tokens before the limit."""
        buffer = self.options.overlong_buffer
        if buffer is not None:
            buffer = min(buffer, outcomes.longest)
            penalty_B = overlong_penalty(
                outcomes.lengths_B, outcomes.longest, buffer, factor=self.options.overlong_factor
            )
            outcomes = replace(outcomes, rewards_B=outcomes.rewards_B + penalty_B)
        return self.group_relative(outcomes)


class Gspo(GroupRelative[GspoOptions]):
    """GSPO (arXiv 2507.18071): the clip acts on the ratio of a whole answer, exp of its tokens' mean log-ratio.

    GRPO's advantages under a sequence's ratio.
    """

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


class Gmpo(GroupRelative[GmpoOptions]):
    """GMPO (arXiv 2507.20673): the geometric mean of an answer's clipped token ratios, times its advantage.

    GRPO's advantages; a mean over answers, whose tokens share their answer's loss equally.
    """

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


class Cispo(GroupRelative[CispoOptions]):
    """CISPO (MiniMax-M1, arXiv 2506.13585): a token's weight is clipped, and none loses its gradient.

    GRPO's advantages under CISPO's weights.
    """

    @override
    def terms(self, batch: TokenBatch) -> Terms:
        return cispo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            clip_low=self.options.clip_low,
            clip_high=self.options.clip_high,
        )


class Sapo(GroupRelative[SapoOptions]):
    """SAPO (arXiv 2511.20347): a soft gate in place of the clip.

    GRPO's advantages under SAPO's gate.
    """

    @override
    def terms(self, batch: TokenBatch) -> Terms:
        return sapo_terms(
            batch.log_probs_K,
            batch.old_log_probs_K,
            batch.advantages_K,
            tau_positive=self.options.tau_positive,
            tau_negative=self.options.tau_negative,
        )


class ClipCov(GroupRelative[ClipCovOptions], ClippedPolicyGradient[ClipCovOptions]):
    """Clip-Cov (arXiv 2505.22617): a random few of the tokens whose covariance lies within bounds have no advantage, to
    keep the entropy.

    Covariances are those of the old log-probs and the advantages over the step's whole batch, so that micro-batches and
    passes see one choice of tokens; verl takes the log-probs of the moment, within each micro-batch.
    """

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
    """KL-Cov, of the same paper: the tokens of the highest covariance pay for their distance from the old policy;
    nothing is clipped.
    """

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
