"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), without a critic and without KL."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.plugins import GrpoOptions

# verl's convention: standard deviation with n - 1, this added to it.
STD_EPSILON = 1e-6


class Grpo(ClippedPolicyGradient):
    """A sample's advantage is its reward against its group.

    Conventions of verl 0.9: see `advantages`.
    """

    least_group = 2

    def __init__(self, options: GrpoOptions) -> None:
        super().__init__(options)
        self._options = options

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """(r - mean) / (std + 1e-6) in each group, std with n - 1; centred only when normalize_std is off.

        Dr. GRPO (arXiv 2503.20783) is the latter with `seq-mean-token-sum`. Equal rewards give exactly 0.
        """
        rewards_B = outcomes.rewards_B.clone()
        for group in range(int(outcomes.groups_B.max()) + 1):
            chosen_B = outcomes.groups_B == group
            rewards_B[chosen_B] = self._compared(rewards_B[chosen_B])
        return rewards_B[:, None] * outcomes.mask_BT

    def _compared(self, rewards_N: Tensor) -> Tensor:
        if bool((rewards_N == rewards_N[0]).all()):
            return rewards_N.new_zeros(len(rewards_N))
        centred_N = rewards_N - rewards_N.mean()
        return centred_N / (rewards_N.std() + STD_EPSILON) if self._options.normalize_std else centred_N
