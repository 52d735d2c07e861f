"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, group_relative
from headrace_trainer.algorithms.plugins import GrpoOptions


class Grpo(ClippedPolicyGradient[GrpoOptions]):
    """A sample's advantage is its reward against its group."""

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """(r - mean) / (std + 1e-6), verl's convention; centred only when normalize_std is off."""
        return group_relative(outcomes, self.options)
