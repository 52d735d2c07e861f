"""DAPO (arXiv 2503.14476): clip-higher, mean over tokens, dynamic sampling, overlong shaping.

Dynamic sampling is the coordinator's: it drops groups of equal rewards and takes the next ones, as `refill` says. It
judges the scorers' rewards, before they are shaped. Overlong filtering is `algorithm.truncated: mask`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient, GroupRelative
from headrace_trainer.algorithms.functional.shaping import overlong_penalty
from headrace_trainer.algorithms.plugins import DapoOptions


class Dapo(GroupRelative[DapoOptions], ClippedPolicyGradient[DapoOptions]):
    """GRPO's advantages of shaped rewards."""

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """GRPO's, of rewards that sink over the last `overlong_buffer` tokens before the limit."""
        buffer = self.options.overlong_buffer
        if buffer is not None:
            buffer = min(buffer, outcomes.longest)
            penalty_B = overlong_penalty(
                outcomes.lengths_B, outcomes.longest, buffer, factor=self.options.overlong_factor
            )
            outcomes = replace(outcomes, rewards_B=outcomes.rewards_B + penalty_B)
        return self.group_relative(outcomes)
