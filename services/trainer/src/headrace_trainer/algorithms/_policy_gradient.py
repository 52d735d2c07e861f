"""What the built-in algorithms share: passes, aggregation, correction, figures. Each adds advantages and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    Barrier,
    CriticPlan,
    LossSums,
    Outcomes,
    Passes,
    Refill,
    TokenBatch,
    TurnCredit,
)
from headrace_trainer.algorithms.functional.advantages.groups import dr_grpo_advantages, grpo_advantages
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.algorithms.functional.aggregation import Terms
from headrace_trainer.algorithms.functional.correction import (
    importance_ratios,
    off_policy_sequence_mask,
    ratio_mask,
    truncated_importance_weights,
)
from headrace_trainer.algorithms.functional.kl import AdaptiveKLController, FixedKLController, kl_estimate
from headrace_trainer.algorithms.functional.losses.policy import ppo_terms
from headrace_trainer.algorithms.options import BOUNDS
from headrace_trainer.algorithms.plugins import (
    Aggregation,
    ClipOptions,
    GroupOptions,
    PolicyOptions,
    StdOptions,
)

Chosen = TypeVar("Chosen", bound=PolicyOptions)
Clipped = TypeVar("Clipped", bound=ClipOptions)
Compared = TypeVar("Compared", bound=StdOptions)
SHOWN = ("clip_fraction", "dual_clip_fraction", "teacher_kl")
"""Metrics of a loss that become figures of a step."""


@dataclass(frozen=True)
class Correction:
    """What becomes of each token, (K,), for having been sampled by another policy than the base.

    `weights_K` multiply the loss; what is not in the bool `kept_K` adds nothing to it, and keeps its place in the
    denominator. `capped_K`: tokens whose weight a bound has changed.
    """

    weights_K: Tensor
    kept_K: Tensor
    capped_K: Tensor

    def figures(self) -> dict[str, Tensor]:
        """Sums over tokens: the weights, and how many are capped or dropped."""
        return {
            "correction_weight": (self.weights_K * self.kept_K).sum(),
            "correction_capped_fraction": self.capped_K.sum().float(),
            "correction_masked_fraction": (~self.kept_K).sum().float(),
        }


class PolicyGradient(Generic[Chosen]):
    """A loss that is a weighted sum over tokens. Subclasses give `advantages` and `terms`."""

    least_group = 1
    greedy_first = False
    needs_teacher = False
    whole_answers = ""
    """Why credit cannot go by turn: "its ratio is ..."; empty where it can."""
    compares = Barrier.GROUP
    """What the advantages need."""
    weighs_terms = False
    """Whether `terms` applies the weights of the correction itself."""

    def __init__(self, options: Chosen) -> None:
        self.options = options
        self._controller = self._at_start()

    @property
    def every_token(self) -> bool:
        """Where the loss has a KL or an entropy term."""
        return bool(self.options.kl_loss_coef or self.options.entropy_coef)

    @property
    def barrier(self) -> Barrier:
        """What the advantages need, and the whole batch for several passes and for the balance of experts."""
        balances = self.balance_loss or self.expert_bias_rate
        return Barrier.BATCH if self.passes.several or balances else self.compares

    @property
    def balance_loss(self) -> float:
        """By `balance_loss_coef`."""
        return self.options.balance_loss_coef

    @property
    def expert_bias_rate(self) -> float:
        """By the option of that name."""
        return self.options.expert_bias_rate

    @property
    def routing_replay(self) -> bool:
        """By the option of that name."""
        return self.options.routing_replay

    @property
    def passes(self) -> Passes:
        """By `epochs`, `minibatches` and `target_kl`."""
        return Passes(self.options.epochs, self.options.minibatches, self.options.target_kl)

    @property
    def refill(self) -> Refill:
        """By `drop_equal` and `max_refill`, where there are such options."""
        options = self.options
        return (
            Refill(options.drop_equal, options.max_refill) if isinstance(options, GroupOptions) else Refill()
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Old log-probs for several passes and for KL rewards; the reference's for a KL term."""
        rewarded = bool(self.options.kl_reward)
        names = []
        if self.passes.several or rewarded:
            names.append(OLD_LOG_PROBS)
        if rewarded or self.options.kl_loss_coef:
            names.append(REFERENCE_LOG_PROBS)
        return tuple(names)

    @property
    def turn_credit(self) -> TurnCredit | None:
        """By `credit` and `turn_discount`."""
        return TurnCredit(self.options.turn_discount) if self.options.credit == "turn" else None

    @property
    def branch_weights(self) -> str:
        """By the option of that name."""
        return self.options.branch_weights

    @property
    def critic(self) -> CriticPlan | None:
        """None, unless a subclass has one."""
        return None

    @property
    def aggregation(self) -> Aggregation:
        """By `loss_aggregation`, where there is such an option."""
        chosen: Aggregation = getattr(self.options, "loss_aggregation", "token-mean")
        return chosen

    def token_weight(self, tokens: int) -> float:
        """Weight of each token of a sequence with `tokens` trained tokens, by `aggregation` (verl's names)."""
        return 1.0 / tokens if self.aggregation == "seq-mean-token-mean" else 1.0

    def denominator(self, tokens: float, sequences: int) -> float:
        """What the weighted sum is divided by; at least 1, so that an empty step has a zero gradient."""
        return float(max(1, tokens if self.aggregation == "token-mean" else sequences))

    def advantages(self, outcomes: Outcomes) -> Tensor | Advantages:
        """(B, T), see `Algorithm.advantages`."""
        raise NotImplementedError

    def terms(self, batch: TokenBatch) -> Terms:
        """Loss of each token, (K,), before weights and correction, with metrics of the same shape."""
        raise NotImplementedError

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum of the terms, corrected for samples of another policy as the options say."""
        terms = self.terms(self._against(batch))
        # Of KL(old || new), whose samples these are; k3 is never negative, so a mean near 0 means that nothing moved.
        moved_K = kl_estimate(batch.old_log_probs_K, batch.log_probs_K.detach(), "k3")
        figures = {name: terms.metrics[name].sum() for name in SHOWN if name in terms.metrics}
        loss_K = terms.loss
        if (found := self.correction(batch)) is not None:
            loss_K = loss_K * found.kept_K if self.weighs_terms else loss_K * found.weights_K * found.kept_K
            figures |= found.figures()
        loss = (loss_K * batch.weights_K).sum()
        if REFERENCE_LOG_PROBS in self.columns:
            reference_K = batch.columns_K[REFERENCE_LOG_PROBS]
            figures["reference_kl"] = kl_estimate(batch.old_log_probs_K, reference_K, "k3").sum()
            if self.options.kl_loss_coef:
                kl_K = kl_estimate(batch.log_probs_K, reference_K, self.options.kl_estimator or "k3")
                loss = loss + self._coefficient(self.options.kl_loss_coef) * (kl_K * batch.weights_K).sum()
        if self.options.entropy_coef:
            assert batch.entropy_K is not None
            loss = loss - self.options.entropy_coef * (batch.entropy_K * batch.weights_K).sum()
        return LossSums(loss, {**figures, "approx_kl": moved_K.sum()})

    def kl_rewards(self, outcomes: Outcomes) -> Tensor:
        """What each token's reward loses for the old policy's KL to the reference: -coefficient * kl, (B, T)."""
        columns_BT = outcomes.columns_BT
        kl_BT: Tensor = kl_estimate(
            columns_BT[OLD_LOG_PROBS],
            columns_BT[REFERENCE_LOG_PROBS],
            # As a reward k3 has no gradient near the reference, and leads away from a far one.
            self.options.kl_estimator or "k1",
            outcomes.mask_BT,
        )
        return -self._coefficient(self.options.kl_reward) * kl_BT

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Steers the KL's coefficient by the step's `reference_kl`, with `kl_target`."""
        if (found := figures.get("reference_kl")) is not None:
            self._controller.update(found, sequences)

    def state(self) -> dict[str, float]:
        """The KL's coefficient, with `kl_target`."""
        if self.options.kl_target is None:
            return {}
        return {"kl_coefficient": self._controller.value, "kl_coefficient_first": self._at_start().value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on with a saved coefficient, unless it began as another than the options' own."""
        self._controller = self._at_start()
        if self.options.kl_target is not None and state.get("kl_coefficient_first") == self._controller.value:
            self._controller.value = state["kl_coefficient"]

    def _at_start(self) -> FixedKLController | AdaptiveKLController:
        value, target = self.options.kl_loss_coef or self.options.kl_reward, self.options.kl_target
        if target is None:
            return FixedKLController(value)
        return AdaptiveKLController(value, target, self.options.kl_horizon)

    def _coefficient(self, fixed: float) -> float:
        """The coefficient of the moment of a term whose option is `fixed`."""
        return fixed if self.options.kl_target is None else self._controller.value

    def correction(self, batch: TokenBatch) -> Correction | None:
        """What the options' correction and mask make of these tokens; None without either."""
        options = self.options
        if options.correction not in BOUNDS and options.off_policy_mask is None:
            return None
        # A token without an engine log-prob has nothing to be corrected for.
        unknown_K = batch.engine_log_probs_K.isnan()
        engine_ST = batch.padded(torch.where(unknown_K, batch.old_log_probs_K, batch.engine_log_probs_K))
        base_ST, mask_ST = batch.padded(batch.old_log_probs_K), batch.mask()
        weights_ST = ratios_ST = torch.ones_like(base_ST)
        kept_ST = mask_ST
        if options.correction in BOUNDS:
            low, high = options.bounds
            level = options.correction_level
            ratios_ST = importance_ratios(base_ST, engine_ST, mask_ST, level=level)
            if options.correction == "mask":
                kept_ST = ratio_mask(base_ST, engine_ST, mask_ST, low=low, high=high, level=level)
                weights_ST = torch.where(kept_ST, ratios_ST, 1.0)
                ratios_ST = weights_ST
            else:
                weights_ST = truncated_importance_weights(
                    base_ST, engine_ST, mask_ST, low=low, high=high, level=level
                )
        if options.off_policy_mask is not None:
            kept_ST = kept_ST & off_policy_sequence_mask(
                base_ST, engine_ST, batch.padded(batch.advantages_K), mask_ST, high=options.off_policy_mask
            )
        weights_K, kept_K = batch.flat(weights_ST), batch.flat(kept_ST)
        return Correction(weights_K, kept_K, kept_K & (weights_K != batch.flat(ratios_ST)))

    def _against(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the old log-probs that `old_log_probs` names; those of the base where the engine told none."""
        if self.options.old_log_probs == "base":
            return batch
        told_K = batch.engine_log_probs_K
        return replace(batch, old_log_probs_K=torch.where(told_K.isnan(), batch.old_log_probs_K, told_K))


class ClippedPolicyGradient(PolicyGradient[Clipped]):
    """PPO's clipped objective, token by token."""

    def terms(self, batch: TokenBatch) -> Terms:
        """By the clip's options."""
        return ppo_terms(batch.log_probs_K, batch.old_log_probs_K, batch.advantages_K, **bounds(self.options))


class Bounds(TypedDict):
    """Of a clipped objective, as the functions take them."""

    clip_low: float
    clip_high: float
    dual_clip: float | None


def bounds(options: ClipOptions) -> Bounds:
    """Those of the options."""
    return Bounds(clip_low=options.clip_low, clip_high=options.clip_high, dual_clip=options.dual_clip)


class GroupRelative(PolicyGradient[Compared]):
    """GRPO's advantages: (r - mean) / (std + 1e-6), verl's convention; centred only when normalize_std is off."""

    least_group = 2

    def group_relative(self, outcomes: Outcomes) -> Tensor:
        """(B, T)."""
        compare = grpo_advantages if self.options.normalize_std else dr_grpo_advantages
        found_BT: Tensor = compare(outcomes.rewards_B, outcomes.groups_B, outcomes.mask_BT)
        return found_BT

    def advantages(self, outcomes: Outcomes) -> Tensor | Advantages:
        """GRPO's."""
        return self.group_relative(outcomes)
