"""REINFORCE (Williams 1992): raw rewards without a baseline, with PPO's clip where a batch is learned from again."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional import discounted_returns, place_outcomes, raw_advantages
from headrace_trainer.algorithms.plugins import RewardedOptions


class Reinforce(ClippedPolicyGradient[RewardedOptions]):
    """See `raw_advantages`; groups do not matter."""

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """A sample's reward at each of its tokens; with KL rewards the rewards to come."""
        if not self.options.kl_reward_coef:
            found_BT: Tensor = raw_advantages(outcomes.rewards_B, outcomes.mask_BT)
            return found_BT
        rewards_BT = place_outcomes(outcomes.rewards_B, outcomes.mask_BT) + self.kl_rewards(outcomes)
        returns_BT: Tensor = discounted_returns(rewards_BT, outcomes.mask_BT)
        return returns_BT
