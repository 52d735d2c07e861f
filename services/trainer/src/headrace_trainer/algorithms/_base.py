"""What an algorithm is: advantages from rewards, and a loss as an unnormalised sum. Knows no model.

Shapes: G groups, N samples of a group, K trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor


class Barrier(Enum):
    """The set that must be complete before its gradient may be taken."""

    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat.

    `engine_log_probs_K` are what the engine reported; NaN where it reported none.
    `weights_K` is each token's share of its sequence, from `Algorithm.token_weight`.
    """

    log_probs_K: Tensor
    engine_log_probs_K: Tensor
    advantages_K: Tensor
    weights_K: Tensor


@dataclass(frozen=True)
class LossSums:
    """An unnormalised loss, with figures to be added up and divided by the trained tokens at the commit."""

    loss: Tensor
    token_sums: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """One policy-gradient algorithm.

    The gradient of a step is `sum over micro-batches of d loss / denominator`, with the denominator known
    only at the commit: so groups may be learned from as they come, in any order and packing.
    """

    @property
    def barrier(self) -> Barrier:
        """GROUP allows streaming accumulation; BATCH waits for the whole step."""

    def advantages(self, rewards_GN: Tensor) -> Tensor:
        """One advantage a sample, (G, N), in the rewards' type."""

    def token_weight(self, tokens: int) -> float:
        """What each of a sequence's `tokens` trained tokens weighs in the sum."""

    def denominator(self, tokens: int, sequences: int) -> float:
        """What the step's sum is divided by, given its trained tokens and sequences that have any."""

    def loss(self, batch: TokenBatch) -> LossSums:
        """The loss of a micro-batch, differentiable in `log_probs_K`."""
