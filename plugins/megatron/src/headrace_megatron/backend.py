"""One rank of a model that learns with megatron-core: gradients, commits, state. Knows no steps and no wire.

As in the fsdp backend, gradients are added up unnormalised in fp32 and divided by the step's denominator at the commit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.backends.shared.model import LossOf
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from headrace_trainer.learning.samples import Rows
from torch import Tensor
from typing_extensions import override

from headrace_megatron.models import MegatronModels
from headrace_megatron.plugin import MegatronOptions


class MegatronBackend(MegatronModels):
    """One rank of a run whose model is divided by megatron-core."""

    @property
    def speaks(self) -> bool:  # type: ignore[override]
        """By the groups that the ranks are divided into."""
        return self._groups.speaks

    @override
    def zero(self) -> None:
        self._drop_gradients()
        self._figures = TokenFigures()

    @override
    def recover(self) -> None:
        if self._loaded is not None:
            self._pipeline.forget()
            self._model.shards.drop_fresh()
            super().recover()

    @override
    def reduce(self, micro_batch_tokens: int, *, recomputes: bool) -> None:
        """What the leader plans has no more tokens already, and nothing here is recomputed."""

    @override
    def _columns(self, names: Many[str], rows: Rows) -> dict[str, Tensor]:
        """All ranks of a replica have its columns; a rank without rows has nothing to compute."""
        known = {OLD_LOG_PROBS} | ({REFERENCE_LOG_PROBS} if self._reference is not None else set())
        if unknown := [name for name in names if name not in known]:
            raise invalid(f"the run has no column {unknown[0]}: no option of its algorithm needs one")
        if not rows and self._layout.experts == 1:
            return {}  # all ranks of the replica have none
        found = {name: self._column(name, rows) for name in names}
        return found if rows else {}

    @override
    def gradient_is_finite(self) -> bool:
        return math.isfinite(self._global_norm(self._model.shards.gradients()))

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The step's whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        found = {
            name: value / denominator for name, value in self._model.gather(self._model.shards.gradients())
        }
        self.zero()
        return found

    def _column(self, name: str, rows: Rows) -> Tensor:
        """(K,) of the trained tokens, on every rank of the replica."""
        with torch.no_grad():
            if name == REFERENCE_LOG_PROBS and self._reference is not None:
                return self._log_probs(self._reference.model, self._reference.pipeline, rows)
            return self._log_probs(self._model, self._pipeline, rows)

    @override
    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> bool:
        self._park()
        idle = self._open.idle
        finite = torch.ones((), dtype=torch.bool, device=self._ranks.device)

        def finish(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, None]:
            nonlocal finite
            log_probs_K, entropy_K = self._model.log_probs(hidden, batch, self._temperature)
            if batch is idle:
                return 0.0 * log_probs_K.sum(), None
            loss = loss_of(Forward(log_probs_K, entropy_K), batch)
            finite = finite & torch.isfinite(loss) & torch.isfinite(log_probs_K).all()
            # Each context-parallel rank computes the loss of all tokens, and their gradients are added up.
            return loss / self._layout.context, None

        self._pipeline.run(self._parts(rows), finish, backward=True)
        # What went backward before a loss that is not finite was known is forgotten with it.
        kept = self._ranks.all_true(bool(finite))
        self._model.finish_gradients(keep=kept)
        return kept

    @override
    def _reduced(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        return self._model.shards.gradients(), frozenset()

    @override
    def _drop_gradients(self) -> None:
        self._model.shards.drop_gradients()

    @override
    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        norms = torch._foreach_norm([gradients[name] for name in self._model.counted])
        own = torch.stack(norms).double().square().sum().item()
        return math.sqrt(self._ranks.sum({"square": own})["square"])


def build(
    options: MegatronOptions, config: TrainerConfig, algorithm: Algorithm, ranks: TrainerGroup
) -> MegatronBackend:
    """The backend of one rank, without weights yet. Raises Refusal INVALID for ranks that do not divide."""
    return MegatronBackend(config, algorithm, ranks, options)
