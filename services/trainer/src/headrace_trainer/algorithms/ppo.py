"""PPO with a critic (arXiv 1707.06347): GAE over tokens, a clipped policy loss and a clipped value loss."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import (
    RETURNS,
    VALUES,
    Barrier,
    CriticPlan,
    LossSums,
    Outcomes,
    TokenBatch,
    TurnCredit,
)
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.functional.advantages.returns import Advantages, gae_advantages
from headrace_trainer.algorithms.functional.advantages.turns import place_turns
from headrace_trainer.algorithms.functional.losses.value import value_terms
from headrace_trainer.algorithms.functional.tensors import place_outcomes
from headrace_trainer.algorithms.plugins import ActorCriticOptions


class Ppo(ClippedPolicyGradient[ActorCriticOptions]):
    """A token's advantage is GAE's, of the critic's values under the base; groups do not matter."""

    every_token = True

    def __init__(self, options: ActorCriticOptions) -> None:
        super().__init__(options)
        self.compares = Barrier.BATCH if options.whiten else Barrier.GROUP

    @property
    def columns(self) -> tuple[str, ...]:
        """Values too: they are what the returns are made of, and what their own loss is clipped against."""
        return (*super().columns, VALUES)

    @property
    def critic(self) -> CriticPlan:
        """By the options whose names begin with critic."""
        chosen = self.options
        return CriticPlan(
            own_model=chosen.critic == "model",
            path=chosen.critic_path,
            learning_rate=chosen.critic_lr,
            warmup_steps=chosen.critic_warmup_steps,
            bootstraps=chosen.bootstrap_truncated,
        )

    @property
    def turn_credit(self) -> TurnCredit | None:
        """The critic's values are a token's own baseline: turns are not compared."""
        found = super().turn_credit
        return found and replace(found, apart=False)

    @override
    def advantages(self, outcomes: Outcomes) -> Advantages:
        """Outcomes are earned by last trained tokens, with credit by turn by those of each turn; KL rewards by all.

        Time passes from token to token with gamma, and from a turn to the next one with gamma * turn_discount.
        Whitened as by verl.
        """
        chosen, turns, discounts_BT = self.options, outcomes.turns, None
        if turns is None:
            rewards_BT = place_outcomes(outcomes.rewards_B, outcomes.mask_BT)
        else:
            rewards_BT, discounts_BT = place_turns(
                turns.rewards_BN, turns.tokens_BN, turns.counts_B, outcomes.mask_BT, chosen.turn_discount
            )
        if chosen.kl_reward_coef:
            rewards_BT = rewards_BT + self.kl_rewards(outcomes)
        found: Advantages = gae_advantages(
            rewards_BT,
            outcomes.columns_BT[VALUES],
            outcomes.mask_BT,
            gamma=chosen.gamma,
            lam=chosen.lam,
            bootstrap_values_B=outcomes.bootstrap_values_B,
            discounts_BT=discounts_BT,
            whiten_advantages=chosen.whiten,
        )
        return found

    def loss(self, batch: TokenBatch) -> LossSums:
        """The policy's, and value_coefficient times the values', weighed and divided alike."""
        sums = super().loss(batch)
        values_K, returns_K = batch.values_K, batch.columns_K[RETURNS]
        assert values_K is not None
        old_K = batch.columns_K[VALUES]
        terms = value_terms(
            values_K, old_K, returns_K, clip=self.options.value_clip, huber_delta=self.options.value_huber
        )
        loss = sums.loss + self.options.value_coefficient * (terms.loss * batch.weights_K).sum()
        errors_K = returns_K - old_K
        figures: dict[str, Tensor] = {
            "value_loss": terms.loss.detach().sum(),
            "value_clip_fraction": terms.metrics["clip_fraction"].sum(),
            "value_mean": old_K.sum(),
            "return_mean": returns_K.sum(),
            "return_square": returns_K.square().sum(),
            "value_error": errors_K.sum(),
            "value_error_square": errors_K.square().sum(),
        }
        return LossSums(loss, {**sums.token_sums, **figures})
