"""GRPO on episodes: the reward of an episode against the other episodes of its start state."""

from __future__ import annotations

from headrace_trainer.algorithms.functional.advantages.groups import dr_grpo_advantages, grpo_advantages
from headrace_trainer.algorithms.group_relative import Grpo

from headrace_robots.trainer.algorithms._base import Credit, EpisodeOutcomes
from headrace_robots.trainer.algorithms._terms import EpisodeTerms
from headrace_robots.trainer.algorithms.advantages import until_success_mask
from headrace_robots.trainer.algorithms.plugins import EpisodeGrpoOptions


class EpisodeGrpo(EpisodeTerms, Grpo):
    """The loss is `Grpo`'s; every action of an episode has the episode's advantage."""

    options: EpisodeGrpoOptions

    def credit(self, outcomes: EpisodeOutcomes) -> Credit:
        """Group-relative, with `normalize_std` divided by the spread; without it centred alone."""
        mask_BTC = outcomes.learned_BTC
        if self.options.until_success:
            mask_BTC = mask_BTC & until_success_mask(outcomes.successes_BTC, outcomes.valid_BTC)
        compare = grpo_advantages if self.options.normalize_std else dr_grpo_advantages
        mask_BK = (mask_BTC.any(-1, keepdim=True) if self.level == "chunk" else mask_BTC).flatten(1)
        advantages_BK = compare(outcomes.rewards_B, outcomes.groups_B, mask_BK)
        return Credit(advantages_BK.view(*mask_BTC.shape[:2], -1), mask_BTC)
