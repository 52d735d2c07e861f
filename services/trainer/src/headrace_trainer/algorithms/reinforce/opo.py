"""OPO (arXiv 2505.23585): the baseline of least variance, by answer length."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.advantages.groups import opo_advantages
from headrace_trainer.algorithms.plugins import PpoOptions


class Opo(ClippedPolicyGradient[PpoOptions]):
    """A reward against its group's mean, which longer answers weigh more in.

    Right on policy only: its baseline has the least variance for the gradient of the policy that sampled.
    """

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group's rewards, weighed by answer length."""
        found_BT: Tensor = opo_advantages(outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT
