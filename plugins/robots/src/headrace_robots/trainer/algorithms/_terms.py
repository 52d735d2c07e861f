"""What the algorithms of episodes share."""

from __future__ import annotations

from headrace_trainer.algorithms._base import Barrier, Passes
from headrace_trainer.algorithms.plugins import Aggregation

from headrace_robots.policies.policy import Level
from headrace_robots.trainer.algorithms.plugins import EpisodeOptions


class EpisodeTerms:
    """What an algorithm of answers, which follows as a base class, does otherwise where it learns from episodes."""

    options: EpisodeOptions
    aggregation: Aggregation

    @property
    def level(self) -> Level:
        """By the option."""
        return self.options.level

    @property
    def barrier(self) -> Barrier:
        """The whole step."""
        return Barrier.BATCH

    @property
    def passes(self) -> Passes:
        """By `epochs`, `minibatches` or `minibatch_size`, and `target_kl`."""
        asked = self.options
        return Passes(asked.epochs, asked.minibatches, asked.target_kl, asked.minibatch_size)

    def denominator(self, units: float, episodes: float) -> float:
        """What a minibatch's sum is divided by. `episodes` counts each by the share of its units that are in it.

        1 where there is nothing, so that an empty minibatch has a zero gradient.
        """
        return (units if self.aggregation == "token-mean" else episodes) or 1.0
