"""On-policy distillation: what the policy samples is compared with a teacher, `trainer.reference`.

By default a token's advantage is its log-prob's distance to the teacher's (Thinking Machines 2025); with `top_k` the
loss is the KL between the two at each token, over the words that the teacher finds likeliest (GKD, arXiv 2306.13649).
Rewards do not matter; scorers only measure.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.distillation import (
    distillation_advantages,
    top_distillation_terms,
)
from headrace_trainer.algorithms.plugins import DistillOptions


class Distill(ClippedPolicyGradient[DistillOptions]):
    """The teacher is the reference model, which must be given."""

    needs_teacher = True
    whole_answers = "it learns from its teacher, and from no reward"

    @property
    def teacher_top(self) -> int:
        """By `top_k`."""
        return self.options.top_k

    @property
    @override
    def every_token(self) -> bool:
        return bool(self.teacher_top) or super().every_token

    @property
    @override
    def columns(self) -> tuple[str, ...]:
        """Both sides of the distance; none where rollouts tell what the teacher finds likeliest."""
        return super().columns if self.teacher_top else (OLD_LOG_PROBS, REFERENCE_LOG_PROBS)

    @override
    def advantages(self, outcomes: Outcomes) -> Tensor:
        """log p_teacher - log p_old of each token; with `top_k` none has one."""
        if self.teacher_top:
            return torch.zeros_like(outcomes.mask_BT, dtype=torch.float64)
        columns_BT = outcomes.columns_BT
        found_BT: Tensor = distillation_advantages(
            columns_BT[OLD_LOG_PROBS], columns_BT[REFERENCE_LOG_PROBS], outcomes.mask_BT
        )
        return found_BT

    @override
    def terms(self, batch: TokenBatch) -> Terms:
        """The clipped objective, or the KL of each token."""
        if not self.teacher_top:
            return super().terms(batch)
        assert batch.top_log_probs_KM is not None and batch.teacher_log_probs_KM is not None
        found = top_distillation_terms(
            batch.top_log_probs_KM, batch.teacher_log_probs_KM, direction=self.options.direction
        )
        return Terms(found.loss, {"teacher_kl": found.loss.detach()})
