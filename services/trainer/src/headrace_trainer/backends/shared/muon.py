"""Muon over the ranks' shards (arXiv 2502.16982): matrices step in orthogonal directions, all else by AdamW.

Knows no model and no ranks: who has the shards of a matrix puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from headrace_modelkit.families.mixtures import expert_blocks
from headrace_schema.sections.learning import OptimizerSection
from torch import Tensor, nn
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)
from typing_extensions import override

from headrace_trainer.backends.shared.optimizer import MOMENTUM, ShardedAdamW

Shards = Iterable[tuple[str, Tensor]]
ThroughWholes = Callable[[Shards, Callable[[Tensor], Tensor]], Iterator[tuple[str, Tensor]]]
"""(name, shard) of what a function makes of whole matrices, from their shards; all ranks exhaust it."""


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the weights that Muon steps: matrices, and stacks of experts', but no embedding, head or convolution."""
    untyped: Any = model
    head = getattr(model, "get_output_embeddings", lambda: None)()
    stacks = {id(block.experts) for block in expert_blocks(untyped)}
    found = set[str]()
    for prefix, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
            continue
        dimensions = 3 if id(module) in stacks else 2
        own = module.named_parameters(prefix, recurse=False)
        found |= {name for name, weight in own if weight.requires_grad and weight.dim() == dimensions}
    return found


class ShardedMuon(ShardedAdamW):
    """As torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, which lets both kinds of weights have one rate."""

    def __init__(
        self,
        config: OptimizerSection,
        shards: dict[str, Tensor],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        through_wholes: ThroughWholes,
        **options: Any,
    ) -> None:
        """`shapes`: of the whole matrices, or of a stack of experts. `options`: AdamW's, of all else."""
        self._shapes, self._through_wholes = shapes, through_wholes
        self._matrices = {name: shards[name] for name in shapes}
        """Also those that have no row here: all ranks put all of them together."""
        super().__init__(config, shards, **options)

    @override
    def kinds_of(self, name: str) -> tuple[str, ...]:
        return (MOMENTUM,) if name in self._shapes else super().kinds_of(name)

    @override
    def step(
        self, gradients: dict[str, Tensor], divisor: float, rate: float, critic_rate: float = 0.0
    ) -> None:
        super().step(gradients, divisor, rate, critic_rate)
        stacked = [name for name, shape in self._shapes.items() if len(shape) > 2]
        directions = self._through_wholes(
            (
                (name, self._wanted(name, gradients[name], divisor))
                for name in self._shapes
                if name not in stacked
            ),
            orthogonal,
        )
        for name, direction in directions:
            self._move(name, direction, rate)
        for name in stacked:  # A rank has whole experts.
            wanted = self._wanted(name, gradients[name], divisor)
            if wanted.numel():
                self._move(name, torch.stack([orthogonal(each) for each in wanted]), rate)
        self._await_host()

    def _wanted(self, name: str, gradient: Tensor, divisor: float) -> Tensor:
        """The shard's momentum as Nesterov looks ahead, in the type that torch makes orthogonal."""
        if not gradient.numel():
            return gradient.bfloat16()
        gradient, state = gradient / divisor, self._adamw.state[self._shards[name]]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        momentum = state[MOMENTUM].to(gradient.device)
        momentum.lerp_(gradient, 1 - self._config.momentum)
        if self._moments_on_host:
            state[MOMENTUM] = self._on_host(name, MOMENTUM, momentum)
        return gradient.lerp(momentum, self._config.momentum).bfloat16()

    def _move(self, name: str, direction: Tensor, rate: float) -> None:
        shard = self._matrices[name]
        shape = torch.Size(self._shapes[name][-2:])
        shard.mul_(1 - rate * self._config.weight_decay)
        shard.add_(direction.to(shard.device), alpha=-_adjust_lr(rate, "match_rms_adamw", shape))

    @override
    def move(self, move: Callable[[Tensor], Tensor], shards: dict[str, Tensor]) -> None:
        super().move(move, shards)
        self._matrices = {name: shards[name] for name in self._shapes}


def orthogonal(matrix: Tensor) -> Tensor:
    """torch's Newton-Schulz iterations, in bfloat16."""
    coefficients = DEFAULT_A, DEFAULT_B, DEFAULT_C
    return _zeropower_via_newtonschulz(matrix, coefficients, DEFAULT_NS_STEPS, EPS)
