"""An algorithm of your own: GRPO against the median of a group, with the clipped loss of the built-in algorithms.

    pip install -e examples/own_algorithm        # beside the trainer, then start the fleet
    headrace run submit examples/own_algorithm/run.yaml --watch

docs/own-algorithm.md walks through this file.
"""

from __future__ import annotations

import torch
from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.plugins import PpoOptions
from pydantic import Field
from torch import Tensor


class MedianOptions(PpoOptions):
    """`algorithm.options`: those of PPO's clip, and one more."""

    margin: float = Field(
        default=0.0, ge=0, description="rewards as near as this to the median count as the median"
    )


class MedianGrpo(ClippedPolicyGradient[MedianOptions]):
    """A = r - median of the group, 0 within the margin. A single outlier does not move the baseline."""

    least_group = 3

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """(B, T): the advantage of each answer at each of its trained tokens."""
        advantages_B = torch.zeros_like(outcomes.rewards_B)
        for group in outcomes.groups_B.unique():
            members_B = outcomes.groups_B == group
            rewards = outcomes.rewards_B[members_B]
            # quantile averages the two middle rewards of an even group; median would take the lower one.
            advantages_B[members_B] = rewards - rewards.quantile(0.5)
        advantages_B[advantages_B.abs() <= self.options.margin] = 0.0
        return advantages_B[:, None] * outcomes.mask_BT


MEDIAN_GRPO = Plugin(MedianGrpo, MedianOptions, "GRPO against the median of a group")
