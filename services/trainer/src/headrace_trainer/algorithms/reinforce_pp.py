"""REINFORCE++ (arXiv 2501.03262), with and without a group's baseline: advantages whitened over the batch's tokens.

Without a reference model there is no KL penalty inside the rewards.
"""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Barrier, Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from headrace_trainer.algorithms.plugins import PpoOptions, ReinforcePpOptions


class ReinforcePp(ClippedPolicyGradient[ReinforcePpOptions]):
    """See `reinforce_plus_plus_advantages`; groups do not matter."""

    compares = Barrier.BATCH

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """Discounted returns, whitened over all trained tokens (verl's variance, with n - 1)."""
        found_BT: Tensor = reinforce_plus_plus_advantages(
            outcomes.rewards_B, outcomes.mask_BT, gamma=self.options.gamma
        ).advantages
        return found_BT


class ReinforcePpBaseline(ClippedPolicyGradient[PpoOptions]):
    """See `reinforce_plus_plus_baseline_advantages`."""

    least_group = 2
    compares = Barrier.BATCH

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group, whitened over all trained tokens of the batch."""
        found_BT: Tensor = reinforce_plus_plus_baseline_advantages(
            outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT
        )
        return found_BT
