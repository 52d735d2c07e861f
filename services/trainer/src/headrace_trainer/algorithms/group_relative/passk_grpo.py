"""Pass@k GRPO (arXiv 2503.19595): what counts is the best of a group's answers."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.advantages.groups import passk_grpo_advantages
from headrace_trainer.algorithms.plugins import GrpoOptions


class PassKGrpo(ClippedPolicyGradient[GrpoOptions]):
    """The best sample of a group has its lead over the second, the others nothing."""

    least_group = 2
    whole_answers = "what counts is the best of whole answers"

    @override
    def advantages(self, outcomes: Outcomes) -> Tensor:
        found_BT: Tensor = passk_grpo_advantages(
            outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT, normalize_std=self.options.normalize_std
        )
        return found_BT
