"""An algorithm of your own, as a package: rewards against the median of their group, with PPO's clip.

pip install ./examples/own_algorithm      # where the trainer runs; then start the fleet again
headrace run submit examples/tiny.yaml --set algorithm.name=median --watch
"""

from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.plugins import PpoOptions
from pydantic import Field
from torch import Tensor


class MedianOptions(PpoOptions):
    """`algorithm.options` of median, beside those of every clipped algorithm (clip_low, epochs, ...)."""

    largest: float = Field(default=2.0, gt=0, description="advantages beyond it are cut")


class Median(ClippedPolicyGradient[MedianOptions]):
    """The median is not moved by one lucky answer, unlike the mean that RLOO and GRPO compare with."""

    least_group = 2  # a group of one has nothing to compare

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """(B, T): one a trained token, 0 elsewhere. B answers of up to T tokens."""
        advantages_B = outcomes.rewards_B.clone()
        for group in outcomes.groups_B.unique():
            members_B = outcomes.groups_B == group
            advantages_B[members_B] -= outcomes.rewards_B[members_B].quantile(0.5)
        advantages_B = advantages_B.clamp(-self.options.largest, self.options.largest)
        return advantages_B.float()[:, None] * outcomes.mask_BT


MEDIAN = Plugin(Median, MedianOptions, "a reward against the median of its group")
