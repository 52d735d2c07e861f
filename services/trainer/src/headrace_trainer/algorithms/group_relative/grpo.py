"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL."""

from __future__ import annotations

from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, GroupRelative
from headrace_trainer.algorithms.plugins import GrpoOptions


class Grpo(GroupRelative[GrpoOptions], ClippedPolicyGradient[GrpoOptions]):
    """A sample's advantage is its reward against its group."""
