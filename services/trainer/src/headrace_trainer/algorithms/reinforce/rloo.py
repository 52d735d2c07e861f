"""RLOO (arXiv 2402.14740): leave-one-out baselines, with PPO's clip where a batch is learned from more than once."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional import rloo_advantages
from headrace_trainer.algorithms.plugins import GroupRewardedOptions


class Rloo(ClippedPolicyGradient[GroupRewardedOptions]):
    """See `rloo_advantages`."""

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group's other rewards; with KL rewards an answer's is r - coefficient * sum of kl (TRL)."""
        rewards_B = outcomes.rewards_B
        if self.options.kl_reward_coef:
            rewards_B = rewards_B + self.kl_rewards(outcomes).sum(1)
        found_BT: Tensor = rloo_advantages(rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT
