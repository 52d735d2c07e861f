"""Tokens to the ranks that have their experts, and back: an all-to-all in each direction, differentiable.

All ranks of the group compute the same layers in the same order, also those without tokens. Knows no model.

Shapes: S rows in the order of their experts, E experts, X experts of a rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from headrace_modelkit.experts import Exchange
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override


class AllToAll(Exchange):
    """Over ranks that have equal shares of the experts, in the order of the ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @override
    def __call__(
        self, rows_SD: Tensor, counts_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        sent_RX = counts_E.view(self._group.size(), -1)
        got_RX = torch.empty_like(sent_RX)
        dist.all_to_all_single(got_RX, sent_RX.contiguous(), group=self._group)
        sent, got = torch.stack([sent_RX.sum(1), got_RX.sum(1)]).tolist()
        arrived_SD = _moved(rows_SD, sent, got, self._group)
        # What came is in the order of ranks, and of experts within each: the experts' products want it by expert.
        experts = torch.arange(got_RX.shape[1], device=got_RX.device).repeat(got_RX.shape[0])
        of_row_S = experts.repeat_interleave(got_RX.flatten(), output_size=len(arrived_SD))
        order_S = of_row_S.argsort(stable=True)
        found_SD = compute(arrived_SD[order_S], got_RX.sum(0))
        return _moved(found_SD[order_S.argsort()], got, sent, self._group)


def _moved(rows_SD: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
    function: Any = _AllToAll
    found: Tensor = function.apply(rows_SD, sent, got, group)
    return found


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, sent: list[int], got: list[int], group: ProcessGroup) -> Tensor:
        ctx.way = sent, got, group
        found_SD = rows_SD.new_empty(sum(got), *rows_SD.shape[1:])
        dist.all_to_all_single(found_SD, rows_SD.contiguous(), got, sent, group=group)
        return found_SD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_SD: Tensor) -> tuple[Tensor | None, ...]:
        sent, got, group = ctx.way
        back_SD = upstream_SD.new_empty(sum(sent), *upstream_SD.shape[1:])
        dist.all_to_all_single(back_SD, upstream_SD.contiguous(), sent, got, group=group)
        return back_SD, None, None, None
