"""What an algorithm of episodes is: an algorithm whose advantages come from episodes. Knows no model.

Shapes: B episodes, T chunks of the longest, C actions of a chunk. A unit is what has one ratio: a number of an action,
an action or a chunk, by the algorithm's `level`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace_trainer.algorithms._base import Algorithm
from torch import Tensor

from headrace_robots.policies.policy import Level


@dataclass(frozen=True)
class EpisodeOutcomes:
    """What became of a step's episodes, in float64.

    `rewards_B` are those of the scorers, `rewards_BTC` of the environment. `valid_BTC` is true at executed actions,
    `trained_B` at episodes that carry loss. `values_BT` and `final_values_B` are the critic's under the weights at
    which the step began, the latter of what an episode that was cut ended with; 0 of one that ended by itself.
    """

    rewards_B: Tensor
    groups_B: Tensor
    trained_B: Tensor
    rewards_BTC: Tensor
    successes_BTC: Tensor
    valid_BTC: Tensor
    values_BT: Tensor
    final_values_B: Tensor
    terminated_B: Tensor

    @property
    def learned_BTC(self) -> Tensor:
        """Executed actions of episodes that carry loss."""
        return self.valid_BTC & self.trained_B[:, None, None]


@dataclass(frozen=True)
class Credit:
    """(B, T, C) advantages and a mask of the actions that are learned from; (B, T) returns, or None without a critic.

    At level chunk the advantages are (B, T, 1).
    """

    advantages: Tensor
    mask_BTC: Tensor
    returns_BT: Tensor | None = None


class EpisodeAlgorithm(Algorithm, Protocol):
    """An algorithm that learns from episodes. Its `loss` gets units in place of tokens; `advantages` is not called.

    `values_K` of a loss is each unit's chunk's; so is RETURNS, where there are returns.
    """

    @property
    def level(self) -> Level:
        """What has one ratio."""

    def denominator(self, tokens: float, sequences: float) -> float:
        """What a minibatch's sum is divided by; an episode counts by the share of its units that are in it."""

    def credit(self, outcomes: EpisodeOutcomes) -> Credit:
        """What each action of a step's episodes is worth. Not a gradient."""
