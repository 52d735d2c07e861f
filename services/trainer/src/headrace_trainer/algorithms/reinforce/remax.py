"""ReMax (arXiv 2310.10505): a reward against that of the prompt's greedy answer, which is the group's first sample."""

from __future__ import annotations

import torch
from torch import Tensor

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
        """R_t - r(greedy answer); 0 in a group that has none, such as of a role that did not speak in it."""
        groups_B, greedy_B = outcomes.groups_B, outcomes.greedy_B
        if greedy_B is None:
            greedy_B = torch.cat([groups_B.new_ones(1), groups_B.diff()]) != 0
        baselines_G = outcomes.rewards_B.new_full((int(groups_B.max()) + 1,), torch.nan)
        baselines_G[groups_B[greedy_B]] = outcomes.rewards_B[greedy_B]
        baselines_B = baselines_G[groups_B]
        rewards: Tensor = outcomes.rewards_B
        if self.options.kl_reward_coef:
            rewards = place_outcomes(rewards, outcomes.mask_BT) + self.kl_rewards(outcomes)
        found = remax_advantages(rewards, baselines_B.nan_to_num(), outcomes.mask_BT)
        advantages_BT: Tensor = found.advantages * ~baselines_B.isnan()[:, None]
        return advantages_BT
