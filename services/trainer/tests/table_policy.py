"""A policy that is a table, in place of a trainer group: real learners over a model that a test can compute.

The log-prob of a token is that of a softmax over the row of the token before it; the value of a place is the entry of
that token. An optimizer step is plain gradient descent. All in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import torch
from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    VALUES,
    Algorithm,
    TokenBatch,
)
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Columns, Rows, Sample
from torch import Tensor


class TableRounds:
    """As `StepRounds` says, on one rank. `steps` has the gradient and the denominator of each optimizer step."""

    replicas, shares_prefixes = 1, True
    costs, micro_batch_tokens = Costs(), 512

    def __init__(self, algorithm: Algorithm, size: int = 12, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.algorithm = algorithm
        self.table = torch.randn(size, size, generator=generator).double().requires_grad_()
        self.values = (torch.randn(size, generator=generator).double() / 3).requires_grad_()
        self.reference = torch.randn(size, size, generator=generator).double()
        self.steps: list[tuple[Tensor, float]] = []
        self._figures, self._held = TokenFigures(), []

    def _tokens(self, sequences: Many[Sample], table: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all trained tokens."""
        before = torch.tensor([s.tokens[at - 1] for s in sequences for at in s.trained], dtype=torch.long)
        drawn = torch.tensor([s.tokens[at] for s in sequences for at in s.trained], dtype=torch.long)
        rows = table[before].log_softmax(-1)
        return rows.gather(1, drawn[:, None])[:, 0], -(rows.exp() * rows).sum(-1)

    def _values(self, sequences: Many[Sample]) -> Tensor:
        return self.values[
            torch.tensor([s.tokens[at - 1] for s in sequences for at in s.trained], dtype=torch.long)
        ]

    def infer(self, groups: Many[list[Sample]], columns: Many[str]) -> list[list[Columns]]:
        def of(sequence: Sample) -> Columns:
            with torch.no_grad():
                known = {
                    OLD_LOG_PROBS: self._tokens([sequence], self.table)[0],
                    REFERENCE_LOG_PROBS: self._tokens([sequence], self.reference)[0],
                    VALUES: self._values([sequence]),
                }
            return {name: known[name].tolist() for name in columns}

        return [[of(sequence) for sequence in group] for group in groups]

    def micro(self, work: Many[list[Rows]]) -> list[bool]:
        return [self._micro([each for row in rows for each in row]) for (rows,) in work]

    def _micro(self, sequences: list[Sample]) -> bool:
        log_probs, entropy = self._tokens(sequences, self.table)
        names = {name for each in sequences for name in each.columns}
        columns = {name: _double([v for each in sequences for v in each.columns[name]]) for name in names}
        batch = TokenBatch(
            log_probs_K=log_probs,
            old_log_probs_K=columns.get(OLD_LOG_PROBS, log_probs.detach()),
            engine_log_probs_K=_double([v for each in sequences for v in each.engine_log_probs]),
            advantages_K=_double(
                [v for each in sequences for v in each.advantages or [0.0] * len(each.trained)]
            ),
            weights_K=_double([each.weight for each in sequences for _ in each.trained]),
            sequences_K=torch.tensor([at for at, each in enumerate(sequences) for _ in each.trained]),
            columns_K=columns,
            entropy_K=entropy,
            values_K=None if self.algorithm.critic is None else self._values(sequences),
        )
        sums = self.algorithm.loss(batch)
        sums.loss.backward()
        self._figures.add(sums, batch)
        self._figures.add_entropy(entropy.detach())
        return bool(torch.isfinite(sums.loss))

    def balance(self, works: Any, denominator: float) -> None:
        """There are no experts."""

    def holds(self) -> bool:
        return self.table.grad is None or bool(torch.isfinite(self.table.grad).all())

    def apply(self, denominator: float, rate: float, critic_rate: float = 0.0) -> CommitReport:
        gradient = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad / denominator
        self.steps.append((gradient.clone(), denominator))
        with torch.no_grad():
            self.table -= rate * gradient
        sums, maxima = self._figures.sums(), self._figures.maxima()
        self.drop()
        self._figures = TokenFigures()
        norm = float(gradient.norm())
        return CommitReport(math.isfinite(norm), norm, sums, maxima, 0.0)

    def hold(self) -> None:
        self._held = [self.table.detach().clone()]

    def end_hold(self, *, back: bool) -> None:
        if back:
            self.table.data.copy_(self._held[0])
        self._held = []

    def drop(self) -> None:
        self.table.grad = self.values.grad = None


def _double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
