"""ReMax (arXiv 2310.10505): a reward against that of the prompt's greedy answer, which is the group's first sample."""

from __future__ import annotations

from torch import Tensor, unique_consecutive

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.advantages.returns import remax_advantages
from headrace_trainer.algorithms.functional.tensors import place_outcomes
from headrace_trainer.algorithms.plugins import RewardedOptions


class Remax(ClippedPolicyGradient[RewardedOptions]):
    """A reward against that of the greedy answer; with KL rewards the returns have them and the baseline does not."""

    least_group = 2
    whole_answers = "its baseline is the reward of a whole greedy answer"
    greedy_first = True

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """R_t - r(greedy answer)."""
        _, groups_B, sizes_G = unique_consecutive(outcomes.groups_B, return_inverse=True, return_counts=True)
        firsts_G = sizes_G.cumsum(0) - sizes_G
        rewards: Tensor = outcomes.rewards_B
        if self.options.kl_reward_coef:
            rewards = place_outcomes(rewards, outcomes.mask_BT) + self.kl_rewards(outcomes)
        found = remax_advantages(rewards, outcomes.rewards_B[firsts_G[groups_B]], outcomes.mask_BT)
        advantages_BT: Tensor = found.advantages
        return advantages_BT
