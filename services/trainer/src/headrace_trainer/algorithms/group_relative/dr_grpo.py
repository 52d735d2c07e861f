"""Dr. GRPO (arXiv 2503.20783): centred rewards, token sums over a constant instead of each answer's length."""

from __future__ import annotations

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.advantages.groups import dr_grpo_advantages
from headrace_trainer.algorithms.plugins import Aggregation, DrGrpoOptions


class DrGrpo(ClippedPolicyGradient[DrGrpoOptions]):
    """The loss is the mean over answers of their token sums, divided by `norm_length`."""

    least_group = 2

    @property
    def aggregation(self) -> Aggregation:
        """The paper's."""
        return "seq-mean-token-sum"

    def token_weight(self, tokens: int) -> float:
        """The same for every token of every answer."""
        return 1.0 / self.options.norm_length

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """r - mean of the group."""
        found_BT: Tensor = dr_grpo_advantages(outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT
