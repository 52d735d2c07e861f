"""REINFORCE and its relatives: rewards against a baseline, without or with PPO's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import Barrier, Outcomes, TokenBatch
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, PolicyGradient
from headrace_trainer.algorithms.functional.advantages.groups import (
    dr_grpo_advantages,
    gpg_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from headrace_trainer.algorithms.functional.advantages.returns import (
    discounted_returns,
    raw_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
)
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.losses.policy import reinforce_terms
from headrace_trainer.algorithms.functional.tensors import place_outcomes
from headrace_trainer.algorithms.plugins import (
    GpgOptions,
    GroupRewardedOptions,
    PpoOptions,
    ReinforcePpOptions,
    RewardedOptions,
)


class Reinforce(ClippedPolicyGradient[RewardedOptions]):
    """REINFORCE (Williams 1992): raw rewards without a baseline, with PPO's clip where a batch is learned from again.

    Rewards as they are; groups do not matter.
    """

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """A sample's reward at each of its tokens; with KL rewards the rewards to come."""
        if not self.options.kl_reward_coef:
            found_BT: Tensor = raw_advantages(outcomes.rewards_B, outcomes.mask_BT)
            return found_BT
        rewards_BT = place_outcomes(outcomes.rewards_B, outcomes.mask_BT) + self.kl_rewards(outcomes)
        returns_BT: Tensor = discounted_returns(rewards_BT, outcomes.mask_BT)
        return returns_BT


class Rloo(ClippedPolicyGradient[GroupRewardedOptions]):
    """RLOO (arXiv 2402.14740): leave-one-out baselines, with PPO's clip where a batch is learned from more than once.

    A reward against the mean of its group's others.
    """

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group's other rewards; with KL rewards an answer's is r - coefficient * sum of kl (TRL)."""
        rewards_B = outcomes.rewards_B
        if self.options.kl_reward_coef:
            rewards_B = rewards_B + self.kl_rewards(outcomes).sum(1)
        found_BT: Tensor = rloo_advantages(rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT


class Opo(ClippedPolicyGradient[PpoOptions]):
    """OPO (arXiv 2505.23585): the baseline of least variance, by answer length.

    A reward against its group's mean, which longer answers weigh more in.

    Right on policy only: its baseline has the least variance for the gradient of the policy that sampled.
    """

    least_group = 2

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group's rewards, weighed by answer length."""
        found_BT: Tensor = opo_advantages(outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT


class Remax(ClippedPolicyGradient[RewardedOptions]):
    """ReMax (arXiv 2310.10505): a reward against that of the prompt's greedy answer, which is the group's first sample.

    A reward against that of the greedy answer; with KL rewards the returns have them and the baseline does not.
    """

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


class ReinforcePp(ClippedPolicyGradient[ReinforcePpOptions]):
    """REINFORCE++ (arXiv 2501.03262), with and without a group's baseline: advantages whitened over the batch's tokens.

    Returns of the rewards, whitened over the batch; groups do not matter.

    Rewards lose their KL to the reference model with `kl_reward_coef`, token by token.
    """

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
    """Group-centred rewards, whitened over the batch."""

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


class Gpg(PolicyGradient[GpgOptions]):
    """GPG (arXiv 2504.02546): group-centred rewards under the plain policy gradient, without a ratio and a clip.

    Group-centred rewards times `alpha`; without that option the scale is the whole batch's.
    """

    least_group = 2

    def __init__(self, options: GpgOptions) -> None:
        super().__init__(options)
        self.compares = Barrier.BATCH if options.alpha is None else Barrier.GROUP

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """alpha (r - mean); alpha None is samples / samples whose reward is not 0 (verl)."""
        found_BT: Tensor = gpg_advantages(
            outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT, alpha=self.options.alpha
        )
        return found_BT

    def terms(self, batch: TokenBatch) -> Terms:
        """-A log p, in every pass."""
        return reinforce_terms(batch.log_probs_K, batch.advantages_K)
