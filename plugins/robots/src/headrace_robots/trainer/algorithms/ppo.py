"""PPO on episodes (arXiv 1707.06347): GAE over chunks, bootstrap at time limits, the clipped losses of `ppo`."""

from __future__ import annotations

from headrace_trainer.algorithms.functional.advantages.returns import whiten
from headrace_trainer.algorithms.ppo import Ppo

from headrace_robots.trainer.algorithms._base import Credit, EpisodeOutcomes
from headrace_robots.trainer.algorithms._terms import EpisodeTerms
from headrace_robots.trainer.algorithms.advantages import chunk_rewards, episode_advantages, with_scores
from headrace_robots.trainer.algorithms.plugins import EpisodePpoOptions


class EpisodePpo(EpisodeTerms, Ppo):
    """The loss is `Ppo`'s; the advantages are those of the environment's rewards, or of the scorers'."""

    options: EpisodePpoOptions

    def credit(self, outcomes: EpisodeOutcomes) -> Credit:
        """GAE over chunks: an action has its chunk's advantage (RLinf's reward_type chunk_level, at any logprob_type).

        The critic says what a chunk is worth, and nothing between its actions. To take off what was earned before an
        action would need the part of it that was expected, too: alone it would leave that part as noise.
        """
        chosen, mask_BTC = self.options, outcomes.learned_BTC
        earned_BTC = with_scores(outcomes.rewards_BTC, outcomes.valid_BTC, outcomes.rewards_B, chosen.score)
        rewards_BTC = earned_BTC * chosen.reward_scale
        chunks_BT = outcomes.valid_BTC.any(-1)
        ends_BT = chunks_BT & (chunks_BT.flip(1).long().cumsum(1).flip(1) == 1)
        advantages_BT, returns_BT = episode_advantages(
            chunk_rewards(rewards_BTC, outcomes.valid_BTC),
            outcomes.values_BT,
            terminated_BT=ends_BT & outcomes.terminated_B[:, None],
            truncated_BT=ends_BT & ~outcomes.terminated_B[:, None],
            final_values_BT=ends_BT * outcomes.final_values_B[:, None],
            next_values_B=outcomes.final_values_B,
            mask_BT=chunks_BT,
            gamma=chosen.gamma,
            lam=chosen.lam,
        )
        if chosen.level == "chunk":
            advantages, mask = advantages_BT[..., None], mask_BTC.any(-1, keepdim=True)
        else:
            advantages, mask = advantages_BT[..., None] * outcomes.valid_BTC, mask_BTC
        return Credit(whiten(advantages, mask) if chosen.whiten else advantages, mask_BTC, returns_BT)
