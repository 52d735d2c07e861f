"""On-policy distillation (Thinking Machines 2025): a token's advantage is its log-prob's distance to a teacher's.

Rewards do not matter; scorers only measure.
"""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.losses.distillation import distillation_advantages
from headrace_trainer.algorithms.plugins import PpoOptions


class Distill(ClippedPolicyGradient[PpoOptions]):
    """A token's advantage is log p_teacher - log p_student; the teacher is the reference model, which must be given."""

    needs_teacher = True
    whole_answers = "it learns from its teacher, and from no reward"

    @property
    def columns(self) -> tuple[str, ...]:
        """Both sides of the distance."""
        return (OLD_LOG_PROBS, REFERENCE_LOG_PROBS)

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """log p_teacher - log p_old of each token."""
        columns_BT = outcomes.columns_BT
        found_BT: Tensor = distillation_advantages(
            columns_BT[OLD_LOG_PROBS], columns_BT[REFERENCE_LOG_PROBS], outcomes.mask_BT
        )
        return found_BT
