"""One rank of a model that learns with megatron-core: gradients, commits, state. Knows no steps and no wire.

As in the fsdp backend, gradients are added up unnormalised in fp32 and divided by the step's denominator at the commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends._base import CommitReport, MicroReport, WarmUp
from headrace_trainer.backends.fsdp.figures import TokenFigures
from headrace_trainer.backends.fsdp.optimizer import AdamWState, ShardedAdamW
from headrace_trainer.backends.fsdp.warmup import SupervisedBatches
from headrace_trainer.backends.losses import Forward, supervised, token_batch
from headrace_trainer.backends.megatron.models import MegatronModels
from headrace_trainer.backends.megatron.pipeline import Passed
from headrace_trainer.backends.plugins import MegatronOptions
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from headrace_trainer.learning.samples import Columns, Rows

LossOf = Callable[[Forward, MicroBatch], Tensor]


class MegatronBackend(MegatronModels):
    """See `Backend`."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: MegatronOptions,
    ) -> None:
        super().__init__(config, algorithm, ranks, options)
        self._figures = TokenFigures()
        self._held: tuple[dict[str, Tensor], AdamWState] | None = None

    def warm_up(self) -> WarmUp:
        """See `Backend`."""
        warmup = self._config.trainer.warmup
        batches = SupervisedBatches(self._config, self.replica, self.replicas)
        optimizer = self._new_optimizer()
        for step in range(warmup.steps):
            work, tokens = batches.step(step, shared=False)
            rounds = int(self._ranks.maximum({"rounds": float(len(work))})["rounds"])
            for index in range(rounds):
                self._backward(work[index] if index < len(work) else [], supervised)
            own = tokens if self._groups.speaks else 0
            self._apply(optimizer, self._ranks.sum({"tokens": float(own)})["tokens"], warmup.lr)
        self.zero()
        return WarmUp(warmup.steps)

    def zero(self) -> None:
        """See `Backend`."""
        self._model.shards.drop_gradients()
        self._figures = TokenFigures()

    def micro(self, rows: Rows) -> MicroReport:
        """See `Backend`. A rank without rows has nothing to compute: nothing is gathered from it."""
        found = TokenFigures()

        def loss_of(forward: Forward, batch: MicroBatch) -> Tensor:
            tokens = token_batch(forward, batch)
            sums = self._algorithm.loss(tokens)
            found.add(sums, tokens)
            found.add_entropy(forward[1].detach())
            return sums.loss

        finite = self._backward(rows, loss_of)
        if finite and rows and self._groups.speaks:
            self._figures.merge(found)
        return MicroReport(finite)

    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        """See `Backend`. All ranks of a replica have its columns."""
        known = {OLD_LOG_PROBS} | ({REFERENCE_LOG_PROBS} if self._reference is not None else set())
        if unknown := [name for name in columns if name not in known]:
            raise invalid(f"the run has no column {unknown[0]}: no option of its algorithm needs one")
        sequences = [sequence for row in rows for sequence in row]
        found: list[Columns] = [{} for _ in sequences]
        for name in columns if rows else ():
            values = iter(self._column(name, rows).tolist())
            for own, sequence in zip(found, sequences, strict=True):
                own[name] = [next(values) for _ in sequence.trained]
        return found

    def gradient_is_finite(self) -> bool:
        """See `Backend`."""
        self._model.reduce_gradients()
        return math.isfinite(self._global_norm())

    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        """See `Backend`."""
        norm = self._apply(self._adamw, denominator, learning_rate)
        sums = self._ranks.sum(self._figures.sums())
        maxima = self._ranks.maximum(self._figures.maxima())
        self._figures = TokenFigures()
        return CommitReport(math.isfinite(norm), norm, sums, maxima)

    def hold(self) -> None:
        """See `Backend`."""
        masters = {name: piece.to("cpu", copy=True) for name, piece in self._model.shards.masters().items()}
        self._held = masters, self._adamw.copy()

    def end_hold(self, *, back: bool) -> None:
        """See `Backend`."""
        held, self._held = self._held, None
        if not back:
            return
        self.zero()
        if held is not None:
            masters, state = held
            for name, piece in self._model.shards.masters().items():
                piece.copy_(masters[name])
            self._adamw.put_back(state)
            self._model.shards.spread()

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The step's whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        self._model.reduce_gradients()
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

    def _backward(self, rows: Rows, loss_of: LossOf) -> bool:
        """Accumulates the loss gradient, unless a loss or a log-prob is not finite on any rank."""
        self._park()
        passed: list[Passed] = []
        losses: list[Tensor] = []
        finite = True
        for part in self._pipeline.forward(self._parts(rows)):
            passed.append(part)
            if self._groups.last_stage:
                log_probs_K, entropy_K = self._model.log_probs(part.hidden, part.batch, self._temperature)
                loss = loss_of((log_probs_K, entropy_K, None), part.batch)
                finite = finite and bool(torch.isfinite(loss)) and bool(torch.isfinite(log_probs_K).all())
                # Each context-parallel rank computes the loss of all tokens, and their gradients are added up.
                losses.append(loss / self._layout.context)
        if not self._ranks.all_true(finite):
            return False
        self._pipeline.backward(passed, losses)
        return True

    def _apply(self, optimizer: ShardedAdamW, denominator: float, rate: float) -> float:
        """Reduce, clip and step; the global norm before clipping. One that is not finite changes nothing."""
        model = self._model
        model.reduce_gradients()
        norm = self._global_norm() / denominator
        if math.isfinite(norm):
            clip = min(1.0, self._config.optimizer.grad_clip / (norm + 1e-6))
            optimizer.step(model.shards.gradients(), denominator / clip, rate)
            model.shards.spread()
        model.shards.drop_gradients()
        return norm

    def _global_norm(self) -> float:
        gradients = self._model.shards.gradients()
        norms = torch._foreach_norm([gradients[name] for name in self._model.counted])
        own = torch.stack(norms).double().square().sum().item()
        return math.sqrt(self._ranks.sum({"square": own})["square"])
