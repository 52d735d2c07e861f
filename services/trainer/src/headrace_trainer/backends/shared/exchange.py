"""Tokens to the ranks that have their experts, and back: an all-to-all in each direction, differentiable.

All ranks of the group compute the same layers in the same order, also those without tokens. Knows no model.

Shapes: S rows in the order of their experts, E experts, X experts of a rank, D hidden; R ranks, C rows that each has
room for from each other one, P = R * C places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from headrace_modelkit.experts import Compute, Exchange, inverse, picked
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override


class _OverRanks(Exchange):
    """Over ranks that have equal shares of the experts, in the order of the ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    @override
    def place(self) -> int:
        return self._group.rank()

    @override
    def added(self, own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=self._group)
        return total


class AllToAll(_OverRanks):
    """Sends each rank the rows of its experts; the host waits for their numbers."""

    @override
    def __call__(self, rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        sent_RX = counts_E.view(self._group.size(), -1)
        got_RX = torch.empty_like(sent_RX)
        dist.all_to_all_single(got_RX, sent_RX.contiguous(), group=self._group)
        sent, got = torch.stack([sent_RX.sum(1), got_RX.sum(1)]).tolist()
        arrived_SD = _moved(rows_SD, sent, got, self._group)
        weights_S = _moved(weights_S, sent, got, self._group)
        # What came is in the order of ranks, and of experts within each: the experts' products want it by expert.
        experts = torch.arange(got_RX.shape[1], device=got_RX.device).repeat(got_RX.shape[0])
        of_row_S = experts.repeat_interleave(got_RX.flatten(), output_size=len(arrived_SD))
        order_S = of_row_S.argsort(stable=True)
        place_S = inverse(order_S)
        weights_S = picked(weights_S, order_S, place_S)
        found_SD = compute(picked(arrived_SD, order_S, place_S), weights_S, got_RX.sum(0))
        return _moved(picked(found_SD, place_S, order_S), got, sent, self._group)


@dataclass
class Room:
    """How many rows a rank takes from each other one in a layer: known before the forward, so that no layer waits for
    the host. Shared by the layers of a model.
    """

    ranks: int
    share: float = 1.5
    """Of the rows that a rank would get if all ranks got as many; grows to what was needed."""
    rows: int = 0
    """That there is room for in this forward; 0: not known, and asked for in each layer."""
    needed: Tensor | None = None
    """The most that a layer of this forward had for one rank, on the device."""

    def begin(self, sent: int) -> None:
        """Of a forward in which no rank of the group has more rows than `sent`."""
        self.rows = min(sent, math.ceil(self.share * sent / self.ranks))
        self.needed = None

    def grow(self, needed: int, sent: int) -> None:
        """After a forward that had not enough."""
        self.share = max(self.share, math.ceil(4 * needed * self.ranks / sent) / 4)


class PaddedAllToAll(_OverRanks):
    """As `AllToAll`, where sizes stay on the device: each rank sends each other one as many rows as there is room for.

    Behind the rows that there are, places have copies of others, which no expert multiplies and nobody takes back. Rows
    that have no place are lost: `room.needed` says so, and the forward is to be made again.
    """

    def __init__(self, group: ProcessGroup, room: Room) -> None:
        super().__init__(group)
        self._room = room

    @override
    def __call__(self, rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        place_S, row_P, order_P, back_P, counts_X = self._places(counts_E, len(rows_SD))
        here_PD = _apart(picked(rows_SD, row_P, place_S), self._group)
        weights_P = _apart(picked(weights_S, row_P, place_S), self._group)
        found_PD = compute(picked(here_PD, order_P, back_P), picked(weights_P, order_P, back_P), counts_X)
        return picked(_apart(picked(found_PD, back_P, order_P), self._group), place_S, row_P)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _places(self, counts_E: Tensor, sent: int) -> tuple[Tensor, ...]:
        """Each row's place, each place's row, the places in the order of the experts that come to them, those back, and
        how many rows came to each expert of this rank.
        """
        room, ranks = self._room, self._group.size()
        sent_RX = counts_E.view(ranks, -1)
        got_RX = torch.empty_like(sent_RX)
        dist.all_to_all_single(got_RX, sent_RX.contiguous(), group=self._group)
        sent_R = sent_RX.sum(1)
        ends_R, most = sent_R.cumsum(0), sent_R.max()
        room.needed = most if room.needed is None else torch.maximum(room.needed, most)
        rows = room.rows or self._most(sent, counts_E.device)
        starts_R, device = ends_R - sent_R, counts_E.device
        own_S = torch.arange(sent, device=device)
        to_S = torch.searchsorted(ends_R, own_S, right=True)
        place_S = to_S * rows + (own_S - starts_R[to_S]).clamp(max=rows - 1)
        places_C = torch.arange(rows, device=device)
        row_P = (starts_R[:, None] + places_C).clamp(max=sent - 1).flatten()
        # What came is in the order of ranks, and of experts within each: the experts' products want it by expert.
        before_RC = places_C.expand(ranks, rows).contiguous()
        expert_P = torch.searchsorted(got_RX.cumsum(1), before_RC, right=True).flatten()
        order_P = expert_P.argsort(stable=True)
        counts_X = expert_P.new_zeros(sent_RX.shape[1] + 1)
        counts_X.scatter_add_(0, expert_P, torch.ones_like(expert_P))
        return place_S, row_P, order_P, inverse(order_P), counts_X[:-1]

    def _most(self, sent: int, device: torch.device) -> int:
        """Room for whatever comes, of a forward that nobody has told the ranks of: the host waits."""
        most = torch.tensor([sent], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most.item())


def swapped(parts: Tensor, group: ProcessGroup) -> Tensor:
    """As much to each rank as to each other one, by the first dimension; the gradient goes the way back."""
    function: Any = _Swap
    found: Tensor = function.apply(parts, group)
    return found


_apart = torch.compiler.disable(swapped)  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _swap(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(upstream, ctx.group), None


def _swap(parts: Tensor, group: ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


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
