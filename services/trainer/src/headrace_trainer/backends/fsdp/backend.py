"""One rank of a model that learns with FSDP2: gradients, contributions, commits. Knows no steps and no wire.

Gradients of micro-batches are added up unnormalised in fp32 and divided by the step's denominator when it is
known, so the order and the packing in which groups come do not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from headrace_schema.openings import TrainerConfig
from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import (
    HelpingBackend,
    PrivateGradient,
    StateReader,
)
from headrace_trainer.backends.fsdp.models import FsdpModels
from headrace_trainer.backends.fsdp.reference import Reference
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.fit import CRITIC
from headrace_trainer.backends.shared.model import LossOf
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import Rows


class FsdpBackend(FsdpModels, HelpingBackend):
    """One rank of a run whose model is divided by fully_shard."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: FsdpOptions | None = None,
    ) -> None:
        super().__init__(config, algorithm, ranks, options)
        self._contributed: dict[str, Tensor] = {}
        """Shards of what helpers have added to the step's gradient."""

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        self._contributed = {name: move(shard) for name, shard in self._contributed.items()}

    @override
    def _warmed_up(self) -> None:
        """A critic that begins as the policy does begins as the warmed-up one."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model or plan.path is not None:
            return
        shards = self._sharded.shards()
        body = f"{self._sharded.model.base_model_prefix}."
        policy = {name.removeprefix(body): shard for name, shard in shards.items()}
        for name in self._sharded.critic_names:
            if name.startswith(f"{CRITIC}body."):
                shards[name].copy_(policy[name.removeprefix(f"{CRITIC}body.")])
        self._sharded.release()

    @override
    def _take_reference(self, *, warmed: bool) -> None:
        trainer = self._config.trainer
        if trainer.lora is None or trainer.reference is not None:
            weights = self._sharded.weights() if warmed else None
            self._reference = Reference(
                self._config,
                self._ranks,
                weights,
                self.layout.shard_ranks,
                self._expert_mesh(),
                self._context,
            )
        else:
            adapters = self._sharded.adapters() if warmed else ()
            self._initial_adapters = {
                name: self._sharded.computed_here(name, tensor).clone() for name, tensor in adapters
            }

    @override
    def zero(self) -> None:
        super().zero()
        self._contributed = {}

    @override
    def load_base(self, reader: StateReader) -> None:
        if self._model is None:
            self.load_state(reader)
            return
        self.zero()
        self._fill(self._sharded.weight_names, reader.weight)
        self._sharded.release()

    @override
    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._sharded.shape(name) for name in self._sharded.parameters}

    @override
    def private_gradient(self) -> PrivateGradient:
        self._finish_backward()
        shards = self._sharded.gradients()
        whole = {name: self._sharded.gather(name, shard) for name, shard in shards.items()}
        return PrivateGradient(whole, self._figures.sums(), self._figures.maxima())

    @override
    def add_gradient(self, given: PrivateGradient | None) -> None:
        for name in self._sharded.parameters:
            shard = self._sharded.scatter(name, given.tensors[name] if given else None)
            own = self._contributed.get(name)
            self._contributed[name] = shard if own is None else own.add_(shard)
        if given is not None:
            self._figures.merge(TokenFigures.of(given.token_sums, given.token_maxima))

    @override
    def _all_gradients(self) -> dict[str, Tensor]:
        """The reduced shards with what helpers have added, which is then part of them and of nothing else."""
        gradients = self._sharded.gradients()
        for name, shard in self._contributed.items():
            gradients[name].add_(shard.to(gradients[name].device))
        self._contributed = {}
        return gradients

    @override
    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> bool:
        self._park()
        batch = self._pack(rows)
        found_K = self._forward(batch, values=values)
        loss = loss_of(found_K, batch)
        # The one moment of a micro-batch in which the host waits for the device.
        finite = bool(torch.isfinite(loss) & torch.isfinite(found_K[0]).all())
        if not self._ranks.all_true(finite):
            return False
        self._dirty = True
        torch.autograd.backward(loss)
        return True
