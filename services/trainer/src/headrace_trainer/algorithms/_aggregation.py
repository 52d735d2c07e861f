"""The three ways to average a token loss, as a weight per token and a denominator per step (verl's names)."""

from __future__ import annotations

from headrace_trainer.algorithms.plugins import Aggregation


def token_weight(mode: Aggregation, tokens: int) -> float:
    """Weight of each token of a sequence with `tokens` trained tokens."""
    return 1.0 / tokens if mode == "seq-mean-token-mean" else 1.0


def denominator(mode: Aggregation, tokens: int, sequences: int) -> float:
    """What the weighted sum is divided by; at least 1, so that an empty step has a zero gradient."""
    return float(max(1, tokens if mode == "token-mean" else sequences))
