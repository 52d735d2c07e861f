"""Context parallel in fsdp: neighbouring ranks divide the tokens of their rows, and attention's heads by all-to-all.

Each rank has every n-th node of a micro-batch, so that all have as many prompts and answers; for attention it gets all
nodes of its share of the heads instead (DeepSpeed Ulysses, arXiv:2309.14509). Log-probs are put together, so that all
ranks of a replica compute one loss; each one's gradient is that of its own nodes, and the sum over all ranks the whole.

Shapes: N nodes, n nodes of a rank, P ranks, H heads, G key heads, D head dimension; others as in `packing`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from headrace_trainer.backends.shared.exchange import swapped
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch

CONTEXT = "trainer.backend_options.context_parallel"
_groups: WeakKeyDictionary[TrainerGroup, dict[int, ProcessGroup]] = WeakKeyDictionary()
"""Process groups are made once in a generation of ranks."""


class ContextGroup:
    """The `size` neighbouring ranks that divide the rows of one replica. All ranks of the trainer group make theirs."""

    def __init__(self, ranks: TrainerGroup, size: int) -> None:
        made = _groups.setdefault(ranks, {})
        if size not in made:
            starts = range(0, ranks.world_size, size)
            each = [dist.new_group(list(range(start, start + size))) for start in starts]
            made[size] = each[ranks.rank // size]
        self.size = size
        self.rank = ranks.rank % size
        self._group = made[size]

    def divided(self, batch: MicroBatch) -> MicroBatch:
        """This rank's nodes of a micro-batch whose segments lie in one row of a multiple of P nodes; on the host."""
        assert batch.segments is not None and not batch.tokens_RL.shape[1] % self.size
        mine_U = (batch.sources_U % self.size == self.rank).nonzero()[:, 0]
        return replace(
            batch,
            tokens_RL=batch.tokens_RL[:, self.rank :: self.size].contiguous(),
            positions_RL=batch.positions_RL[:, self.rank :: self.size].contiguous(),
            sources_U=batch.sources_U[mine_U] // self.size,
            targets_U=batch.targets_U[mine_U],
            temperatures_U=None if batch.temperatures_U is None else batch.temperatures_U[mine_U],
            mine_U=mine_U,
            pairs=len(batch.sources_U),
        )

    def to_heads(self, own_1HnD: Tensor) -> Tensor:
        """(1, H / P, N, D) all nodes of this rank's heads. Fewer key heads than ranks, or a number that does not
        divide, are repeated until each rank has those of its query heads.
        """
        heads = own_1HnD.shape[1]
        own_HnD = own_1HnD.squeeze(0).repeat_interleave(self.size // math.gcd(heads, self.size), 0)
        parts = swapped(own_HnD.reshape(self.size, -1, *own_HnD.shape[1:]), self._group)
        return parts.permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0)

    def to_nodes(self, own_1NHD: Tensor) -> Tensor:
        """(1, n, H, D) all heads of this rank's nodes, from all nodes of its heads."""
        parts = own_1NHD.reshape(-1, self.size, *own_1NHD.shape[2:]).transpose(0, 1)
        return swapped(parts, self._group).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def whole(self, own_U: Tensor, batch: MicroBatch) -> Tensor:
        """Values of all pairs of a micro-batch, from those of this rank's."""
        function: Any = _Whole
        found_U: Tensor = function.apply(own_U, batch.mine_U, batch.pairs, self._group)
        return found_U


class _Whole(torch.autograd.Function):
    """All ranks compute one loss of the whole, so that each takes its own part of the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, own_U: Tensor, mine_U: Tensor, pairs: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine_U)
        whole_U = own_U.new_zeros(pairs, *own_U.shape[1:]).index_copy_(0, mine_U, own_U)
        dist.all_reduce(whole_U, group=group)
        return whole_U

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_U: Tensor) -> tuple[Tensor | None, ...]:
        (mine_U,) = ctx.saved_tensors
        return upstream_U.index_select(0, mine_U), None, None, None
