"""REINFORCE++ (arXiv 2501.03262), with and without a group's baseline: advantages whitened over the batch's tokens.

Rewards lose their KL to the reference model with `kl_reward_coef`, token by token.
"""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Barrier, Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional import (
    dr_grpo_advantages,
    place_outcomes,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from headrace_trainer.algorithms.plugins import ReinforcePpOptions, RewardedOptions


class ReinforcePp(ClippedPolicyGradient[ReinforcePpOptions]):
    """See `reinforce_plus_plus_advantages`; groups do not matter."""

    compares = Barrier.BATCH

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """Discounted returns, whitened over all trained tokens (verl's variance, with n - 1)."""
        rewards = outcomes.rewards_B
        if self.options.kl_reward_coef:
            rewards = place_outcomes(rewards, outcomes.mask_BT) + self.kl_rewards(outcomes)
        found_BT: Tensor = reinforce_plus_plus_advantages(
            rewards, outcomes.mask_BT, gamma=self.options.gamma
        ).advantages
        return found_BT


class ReinforcePpBaseline(ClippedPolicyGradient[RewardedOptions]):
    """See `reinforce_plus_plus_baseline_advantages`."""

    least_group = 2
    compares = Barrier.BATCH

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group, whitened over all trained tokens of the batch; with KL rewards, OpenRLHF's returns."""
        if not self.options.kl_reward_coef:
            found_BT: Tensor = reinforce_plus_plus_baseline_advantages(
                outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT
            )
            return found_BT
        centred_B = dr_grpo_advantages(outcomes.rewards_B, outcomes.groups_B)
        penalised_BT = place_outcomes(centred_B, outcomes.mask_BT) + self.kl_rewards(outcomes)
        returns_BT: Tensor = reinforce_plus_plus_advantages(penalised_BT, outcomes.mask_BT).advantages
        return returns_BT
