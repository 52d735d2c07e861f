"""What the algorithms of episodes share."""

from __future__ import annotations

from headrace_trainer.algorithms._base import Passes
from headrace_trainer.algorithms.episodes.plugins import EpisodeOptions
from headrace_trainer.algorithms.plugins import Aggregation


def episode_passes(options: EpisodeOptions) -> Passes:
    """By `epochs`, `minibatches` or `minibatch_size`, and `target_kl`."""
    return Passes(options.epochs, options.minibatches, options.target_kl, options.minibatch_size)


def unit_denominator(aggregation: Aggregation, units: float, episodes: float) -> float:
    """What a minibatch's sum is divided by. `episodes` counts each by the share of its units that are in it.

    1 where there is nothing, so that an empty minibatch has a zero gradient.
    """
    return (units if aggregation == "token-mean" else episodes) or 1.0
