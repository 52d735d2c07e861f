"""One rank of a model that learns with FSDP2: gradients, contributions, commits. Knows no steps and no wire.

Gradients of micro-batches are added up unnormalised in fp32 and divided by the step's denominator when it is
known, so the order and the packing in which groups come do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends._base import (
    CommitReport,
    MicroReport,
    PrivateGradient,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.fsdp.figures import TokenFigures
from headrace_trainer.backends.fsdp.models import FsdpModels
from headrace_trainer.backends.fsdp.optimizer import AdamWState, ShardedAdamW
from headrace_trainer.backends.fsdp.reference import Reference
from headrace_trainer.backends.fsdp.sharding import CRITIC
from headrace_trainer.backends.fsdp.warmup import SupervisedBatches
from headrace_trainer.backends.losses import Forward, supervised, token_batch
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from headrace_trainer.learning.samples import Rows

LossOf = Callable[[Forward, MicroBatch], Tensor]


class FsdpBackend(FsdpModels):
    """See `Backend`."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: FsdpOptions | None = None,
    ) -> None:
        super().__init__(config, algorithm, ranks, options)
        self._figures = TokenFigures()
        self._held: tuple[dict[str, Tensor], AdamWState] | None = None
        self._contributed: dict[str, Tensor] = {}
        """Shards of what helpers have added to the step's gradient."""

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `FsdpModels`."""
        super().move(move)
        self._contributed = {name: move(shard) for name, shard in self._contributed.items()}

    def warm_up(self) -> WarmUp:
        """See `Backend`."""
        warmup = self._config.trainer.warmup
        batches = SupervisedBatches(self._config, self._ranks.rank, self._ranks.world_size)
        optimizer = self._new_optimizer()
        for step in range(warmup.steps):
            work, tokens = batches.step(step, shared=self.shares_prefixes)
            rounds = int(self._ranks.maximum({"rounds": float(len(work))})["rounds"])
            for index in range(rounds):
                rows = work[index] if index < len(work) else []
                self._backward(rows, supervised)
            self._apply(optimizer, self._ranks.sum({"tokens": float(tokens)})["tokens"], warmup.lr)
        self.zero()
        self._same_as_policy()
        return WarmUp(warmup.steps)

    def _same_as_policy(self) -> None:
        """A critic that begins as the policy does begins as the warmed-up one."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model or plan.path is not None:
            return
        shards = self._sharded.shards()
        policy = {name.removeprefix(self._sharded.body_prefix): shard for name, shard in shards.items()}
        for name in self._sharded.critic_names:
            if name.startswith(f"{CRITIC}body."):
                shards[name].copy_(policy[name.removeprefix(f"{CRITIC}body.")])
        self._sharded.release()

    def load_reference(self) -> None:
        """See `Backend`."""
        if REFERENCE_LOG_PROBS not in self._algorithm.columns:
            return
        trainer = self._config.trainer
        warmed = trainer.reference is None and trainer.warmup.steps > 0
        if warmed and self._model is None:  # A checkpoint is about to be loaded: the warm-up is made again.
            torch.manual_seed(self._config.seed)
            self.load_initial()
            self.warm_up()
        if trainer.lora is None or trainer.reference is not None:
            weights = dict(self._sharded.weights()) if warmed else None
            self._reference = Reference(self._config, self._ranks, weights)
        else:
            adapters = self._sharded.adapters() if warmed else ()
            self._initial_adapters = {name: tensor.clone() for name, tensor in adapters}

    def zero(self) -> None:
        """See `Backend`."""
        if self._dirty:
            self._sharded.finish_backward()
        self._sharded.drop_gradients()
        self._figures = TokenFigures()
        self._contributed = {}
        self._dirty = False

    def micro(self, rows: Rows) -> MicroReport:
        """See `Backend`."""
        found = TokenFigures()

        def loss_of(found_K: Forward, batch: MicroBatch) -> Tensor:
            tokens = token_batch(found_K, batch)
            sums = self._algorithm.loss(tokens)
            found.add(sums, tokens)
            return sums.loss

        entropy_K = self._backward(rows, loss_of, values=self._algorithm.critic is not None)
        if entropy_K is None:
            return MicroReport(finite=False)
        if rows:
            found.add_entropy(entropy_K)
            self._figures.merge(found)
        return MicroReport(finite=True)

    def gradient_is_finite(self) -> bool:
        """See `Backend`."""
        if self._dirty:
            self._sharded.finish_backward()
            self._dirty = False
        return math.isfinite(self._global_norm(self._sharded.gradients()))

    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        """See `Backend`."""
        norm, critic_norm = self._apply(self._adamw, denominator, learning_rate, critic_rate)
        sums = self._ranks.sum(self._figures.sums())
        maxima = self._ranks.maximum(self._figures.maxima())
        self._figures = TokenFigures()
        finite = math.isfinite(norm + critic_norm)
        return CommitReport(finite, norm, sums, maxima, critic_norm)

    def hold(self) -> None:
        """See `Backend`."""
        weights = {name: shard.to("cpu", copy=True) for name, shard in self._sharded.shards().items()}
        self._held = weights, self._adamw.copy()

    def end_hold(self, *, back: bool) -> None:
        """See `Backend`."""
        held, self._held = self._held, None
        if not back:
            return
        self.zero()
        if held is not None:
            weights, state = held
            for name, shard in self._sharded.shards().items():
                shard.copy_(weights[name])
            self._adamw.put_back(state)
            self._sharded.release()  # whole parameters of an earlier forward are of other weights

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The step's whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        self._sharded.finish_backward()
        shards = self._all_gradients()
        whole = {name: self._sharded.gather(name, shard) / denominator for name, shard in shards.items()}
        self._dirty = False
        self.zero()
        return whole

    def load_base(self, reader: StateReader) -> None:
        """See `HelpingBackend`."""
        if self._model is None:
            self.load_state(reader)
            return
        self.zero()
        for name, shard in self._sharded.shards().items():
            shard.copy_(self._sharded.scatter(name, reader.weight(name)))
        for name, buffer in self._sharded.buffers.items():
            buffer.copy_(reader.weight(name))
        self._sharded.release()

    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `HelpingBackend`."""
        return {name: tuple(parameter.shape) for name, parameter in self._sharded.parameters.items()}

    def private_gradient(self) -> PrivateGradient:
        """See `HelpingBackend`."""
        if self._dirty:
            self._sharded.finish_backward()
            self._dirty = False
        shards = self._sharded.gradients()
        whole = {name: self._sharded.gather(name, shard) for name, shard in shards.items()}
        return PrivateGradient(whole, self._figures.sums(), self._figures.maxima())

    def add_gradient(self, given: PrivateGradient | None) -> None:
        """See `HelpingBackend`."""
        for name in self._sharded.parameters:
            shard = self._sharded.scatter(name, given.tensors[name] if given else None)
            own = self._contributed.get(name)
            self._contributed[name] = shard if own is None else own.add_(shard)
        if given is not None:
            self._figures.merge(TokenFigures.of(given.token_sums, given.token_maxima))

    def _all_gradients(self) -> dict[str, Tensor]:
        """The reduced shards with what helpers have added, which is then part of them and of nothing else."""
        gradients = self._sharded.gradients()
        for name, shard in self._contributed.items():
            gradients[name].add_(shard)
        self._contributed = {}
        return gradients

    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> Tensor | None:
        """Accumulates the loss gradient; the tokens' entropies, or None when any rank is not finite."""
        self._park()
        batch = self._pack(rows or self._dummy)
        found_K = self._forward(batch, values=values)
        log_probs_K, entropy_K, _ = found_K
        loss = loss_of(found_K, batch)
        finite = bool(torch.isfinite(loss)) and bool(torch.isfinite(log_probs_K).all())
        if not self._ranks.all_true(finite):
            return None
        self._dirty = True
        torch.autograd.backward(loss)
        detached: Tensor = entropy_K.detach()
        return detached

    def _apply(
        self, optimizer: ShardedAdamW, denominator: float, rate: float, critic_rate: float = 0.0
    ) -> tuple[float, float]:
        """Reduce, vote, clip and step; the global norms before clipping. One that is not finite changes nothing.

        The critic's own weights are clipped apart, so that a bad critic does not slow the policy.
        """
        if self._dirty:
            self._sharded.finish_backward()
        gradients = self._all_gradients()
        beside = {name: gradients[name] for name in self._sharded.critic_names if name in gradients}
        own = {name: gradient for name, gradient in gradients.items() if name not in beside}
        norm = self._global_norm(own) / denominator
        critic_norm = self._global_norm(beside) / denominator if beside else 0.0
        if math.isfinite(norm + critic_norm):
            clip, critic_clip = self._clip(norm), self._clip(critic_norm)
            for gradient in beside.values():
                gradient.mul_(critic_clip / clip)
            optimizer.step(gradients, denominator / clip, rate, critic_rate)
            # A forward without a backward leaves whole parameters behind, which the step has not moved.
            self._sharded.release()
        self._sharded.drop_gradients()
        self._dirty = False
        return norm, critic_norm

    def _clip(self, norm: float) -> float:
        return min(1.0, self._config.optimizer.grad_clip / (norm + 1e-6))

    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        norms = torch._foreach_norm(list(gradients.values()))
        own = torch.stack(norms).double().square().sum().item()
        return math.sqrt(self._ranks.sum({"square": own})["square"])
