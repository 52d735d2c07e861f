"""GRPO on episodes: the reward of an episode against the other episodes of its start state."""

from __future__ import annotations

from headrace_modelkit.robot.policy import Level

from headrace_trainer.algorithms._base import Barrier, Passes
from headrace_trainer.algorithms.episodes._base import Credit, EpisodeOutcomes
from headrace_trainer.algorithms.episodes._terms import episode_passes, unit_denominator
from headrace_trainer.algorithms.episodes.plugins import EpisodeGrpoOptions
from headrace_trainer.algorithms.functional import dr_grpo_advantages, grpo_advantages, until_success_mask
from headrace_trainer.algorithms.group_relative.grpo import Grpo


class EpisodeGrpo(Grpo):
    """The loss is `Grpo`'s; every action of an episode has the episode's advantage."""

    options: EpisodeGrpoOptions

    def __init__(self, options: EpisodeGrpoOptions) -> None:
        super().__init__(options)

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
        """By the options."""
        return episode_passes(self.options)

    def denominator(self, tokens: float, sequences: float) -> float:
        """See `unit_denominator`."""
        return unit_denominator(self.aggregation, tokens, sequences)

    def credit(self, outcomes: EpisodeOutcomes) -> Credit:
        """Group-relative, with `normalize_std` divided by the spread; without it centred alone."""
        mask_BTC = outcomes.learned_BTC
        if self.options.until_success:
            mask_BTC = mask_BTC & until_success_mask(outcomes.successes_BTC, outcomes.valid_BTC)
        compare = grpo_advantages if self.options.normalize_std else dr_grpo_advantages
        mask_BK = (mask_BTC.any(-1, keepdim=True) if self.level == "chunk" else mask_BTC).flatten(1)
        advantages_BK = compare(outcomes.rewards_B, outcomes.groups_B, mask_BK)
        return Credit(advantages_BK.view(*mask_BTC.shape[:2], -1), mask_BTC)
