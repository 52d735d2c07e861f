"""Figures over trained tokens, kept as sums and maxima so that they add up over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_trainer.algorithms._base import LossSums, TokenBatch


class TokenFigures:
    """Sums over tokens: `loss` (as the algorithm weighs it), `entropy`, `mismatch`, the algorithm's own."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {"tokens": 0.0, "engine_tokens": 0.0, "loss": 0.0, "entropy": 0.0}
        self._sums["mismatch"] = 0.0
        self._own: dict[str, float] = {}
        self._mismatch_max = 0.0

    def add(self, sums: LossSums, batch: TokenBatch) -> None:
        """Adds a micro-batch. The mismatch is that of the old log-probs; tokens without an engine one are left out."""
        difference_K = (batch.old_log_probs_K - batch.engine_log_probs_K).abs()
        known_K = torch.isfinite(difference_K)
        self._sums["tokens"] += float(batch.log_probs_K.numel())
        self._sums["engine_tokens"] += float(known_K.sum())
        self._sums["loss"] += float(sums.loss.detach())
        if known_K.any():
            self._sums["mismatch"] += float(difference_K[known_K].sum())
            self._mismatch_max = max(self._mismatch_max, float(difference_K[known_K].max()))
        for name, value in sums.token_sums.items():
            self._own[name] = self._own.get(name, 0.0) + float(value.detach())

    def add_entropy(self, entropy_K: Tensor) -> None:
        """Adds the entropies of a micro-batch's tokens."""
        self._sums["entropy"] += float(entropy_K.sum())

    def merge(self, other: TokenFigures) -> None:
        """Adds another's."""
        for name, value in other._sums.items():
            self._sums[name] += value
        for name, value in other._own.items():
            self._own[name] = self._own.get(name, 0.0) + value
        self._mismatch_max = max(self._mismatch_max, other._mismatch_max)

    def sums(self) -> dict[str, float]:
        """Sums by name; the algorithm's own are prefixed "own."."""
        return self._sums | {f"own.{name}": value for name, value in self._own.items()}

    def maxima(self) -> dict[str, float]:
        """Maxima by name."""
        return {"mismatch": self._mismatch_max}
