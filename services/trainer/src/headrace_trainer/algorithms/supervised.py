"""Supervised learning: the likelihood of answers that the data gives, each weighed by its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from headrace_servicekit.registry import Options
from torch import Tensor

from headrace_trainer.algorithms._base import (
    Barrier,
    CriticPlan,
    LossSums,
    Outcomes,
    Passes,
    Refill,
    TokenBatch,
)
from headrace_trainer.algorithms.given import SftOptions

Chosen = TypeVar("Chosen", bound=Options)


class GivenAnswers(Generic[Chosen]):
    """-A log p of every trained token, in one optimizer step of the whole batch. Subclasses give `advantages`.

    The batch is complete before anything is computed of it, so that how it is packed hangs on nothing but itself.
    """

    barrier, passes, refill = Barrier.BATCH, Passes(), Refill()
    least_group = 1
    greedy_first = every_token = needs_teacher = False
    critic: CriticPlan | None = None
    columns: tuple[str, ...] = ()

    def __init__(self, options: Chosen) -> None:
        self.options = options

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """(B, T), see `Algorithm.advantages`."""
        raise NotImplementedError

    def token_weight(self, tokens: int) -> float:
        """Tokens weigh alike."""
        return 1.0

    def denominator(self, tokens: float, sequences: int) -> float:
        """The answers; at least 1, so that an empty step has a zero gradient."""
        return float(max(1, sequences))

    def loss(self, batch: TokenBatch) -> LossSums:
        """Weighted sum."""
        return LossSums(-(batch.advantages_K * batch.log_probs_K * batch.weights_K).sum())

    def batch_figures(self) -> dict[str, float]:
        """Figures of the batch whose advantages were computed last."""
        return {}

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Nothing is steered."""

    def state(self) -> dict[str, float]:
        """None."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """None."""


class Sft(GivenAnswers[SftOptions]):
    """Cross entropy of the answers' tokens."""

    def advantages(self, outcomes: Outcomes) -> Tensor:
        """The answer's weight at each token."""
        return outcomes.rewards_B[:, None] * outcomes.mask_BT

    def token_weight(self, tokens: int) -> float:
        """By `loss_aggregation` (verl's names)."""
        return 1.0 / tokens if self.options.loss_aggregation == "seq-mean-token-mean" else 1.0

    def denominator(self, tokens: float, sequences: int) -> float:
        """Tokens or answers, by `loss_aggregation`."""
        return float(max(1, tokens if self.options.loss_aggregation == "token-mean" else sequences))
