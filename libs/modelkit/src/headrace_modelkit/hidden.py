"""Log-probs and entropies straight from hidden states, with the logits in tiles over rows and vocabulary.

Shapes: N rows, M tokens of a row, D hidden, V vocabulary, C columns of a tile, J tiles of a row. Knows no sampling
and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace_modelkit import logprobs
from headrace_modelkit.logprobs import Head, Temperature, scale, wide_product
from headrace_modelkit.products import COLUMNS, product

Gather = Callable[[Tensor], Tensor]
"""(N,) of this rank to (ranks, N)."""
TILES_IN_CHUNK = 32
TILE_COLUMNS = COLUMNS
"""Words of a tile on a CPU, so that it stays in the caches. Other devices take whole rows: fewer, larger kernels."""


def hidden_log_probs(
    head: Head,
    hidden_ND: Tensor,
    tokens_N: Tensor,
    temperature: Temperature,
    *,
    entropy: bool = False,
    gather: Gather | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fp32 log-probs of `tokens_N`, (N,) or (N, M), and (N,) entropies in nats when asked, straight from hidden states.

    Logits beyond one chunk exist a tile at a time, in both passes. Both results are differentiable in hidden states
    and head. The gradient of a head's parameter is fp32 whatever the parameter's type (it is a sum over tiles, and
    micro-batches are added to it), so its `grad_dtype` is set here.

    With `gather` the vocabulary is divided over ranks: the head is this rank's part, and `tokens_N` count from its
    first word, so that other ranks' words are below 0 or behind its last one. Results are equal on all ranks, gradients
    are this rank's: those of the hidden states add up over the ranks.
    """
    for parameter in (head.weight_VD, head.bias_V):
        if parameter is not None:
            gather_in_fp32(parameter)
    function: Any = _HiddenLogProbs
    tokens_NM = tokens_N if tokens_N.dim() > 1 else tokens_N[:, None]
    found_NM, entropy_N = function.apply(
        hidden_ND, head.weight_VD, head.bias_V, tokens_NM, head, temperature, entropy, gather
    )
    return found_NM.view_as(tokens_N), (entropy_N if entropy else None)


def vocabulary_totals(scaled_NV: Tensor) -> Tensor:
    """(N,) logsumexp of logits, to the bits that `hidden_log_probs` of a model of `invariant` subtracts."""
    totals = [_summary(scaled_NV[:, columns], False)[0] for columns in _slices(scaled_NV.shape[-1], COLUMNS)]
    stacked_JN = torch.stack(totals)
    return _merged(stacked_JN, torch.zeros_like(stacked_JN))[0]


def gather_in_fp32(parameter: Tensor) -> None:
    """Lets a parameter's gradient be fp32, unless it has one of its own type already."""
    if parameter.requires_grad and parameter.is_leaf and parameter.grad is None:
        parameter.grad_dtype = torch.float32


class _HiddenLogProbs(torch.autograd.Function):
    """See `hidden_log_probs`. One function over all tiles, because autograd adds up in the parameter's type."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_NM: Tensor,
        head: Head,
        temperature: Temperature,
        entropy: bool,
        gather: Gather | None,
    ) -> tuple[Tensor, Tensor]:
        tiling = _Tiling.of(hidden_ND, weight_VD, fixed=head.invariant)
        chosen_NM = torch.zeros_like(tokens_NM, dtype=torch.float32)
        totals: list[Tensor] = []
        means: list[Tensor] = []
        kept_NV: Tensor | None = None
        for part, columns in tiling.parts(head):
            totals.append(chosen_NM.new_empty(len(chosen_NM)))
            means.append(chosen_NM.new_zeros(len(chosen_NM)))
            for rows in tiling.rows():
                products_NC = part.products(hidden_ND[rows])
                scaled_NC = scale(part.shaped(products_NC), _of(temperature, rows))
                own = _Chosen.of(tokens_NM[rows], columns)
                chosen_NM[rows] += scaled_NC.gather(-1, own.index_NM).where(own.inside_NM, 0.0)
                totals[-1][rows], means[-1][rows] = _summary(scaled_NC, entropy)
                kept_NV = products_NC if tiling.alone and any(ctx.needs_input_grad) else None
        total_N, mean_N = _merged(torch.stack(totals), torch.stack(means))
        if gather is not None:
            chosen_NM = gather(chosen_NM.flatten()).sum(0).view_as(chosen_NM)
            total_N, mean_N = _merged(gather(total_N), gather(mean_N))
        entropy_N = total_N - mean_N if entropy else torch.zeros_like(total_N)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, tokens_NM, total_N, entropy_N, kept_NV)
        ctx.head, ctx.temperature = replace(head, weight_VD=weight_VD.new_empty(0), bias_V=None), temperature
        ctx.set_materialize_grads(False)
        return chosen_NM - total_N[:, None], entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, upstream_NM: Tensor | None, of_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, tokens_NM, total_N, entropy_N, kept_NV = ctx.saved_tensors
        head = replace(ctx.head, weight_VD=weight_VD, bias_V=bias_V)
        if upstream_NM is None:
            upstream_NM = torch.zeros_like(tokens_NM, dtype=torch.float32)
        upstream_N = upstream_NM[:, 0] if upstream_NM.shape[1] == 1 else upstream_NM.sum(-1)
        of_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32)
        of_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias_V = total_N.new_zeros(len(weight_VD)) if ctx.needs_input_grad[2] else None
        tiling = _Tiling.of(hidden_ND, weight_VD, fixed=head.invariant)
        for part, columns in tiling.parts(head):
            for rows in tiling.rows():
                shaped_NC = part.shaped(part.products(hidden_ND[rows]) if kept_NV is None else kept_NV)
                found_NC = _softmax_gradient(
                    scale(shaped_NC, _of(ctx.temperature, rows)) - total_N[rows, None],
                    upstream_N[rows],
                    None if of_entropy_N is None else of_entropy_N[rows],
                    entropy_N[rows],
                )
                own = _Chosen.of(tokens_NM[rows], columns)
                found_NC.scatter_add_(-1, own.index_NM, upstream_NM[rows].where(own.inside_NM, 0.0))
                part.through_shape(found_NC, shaped_NC, _of(ctx.temperature, rows))
                if of_bias_V is not None:
                    of_bias_V[columns] += found_NC.sum(0)
                if logprobs.narrow_products(hidden_ND, weight_VD):
                    _add_narrow(
                        of_hidden_ND[rows], of_weight_VD, found_NC, hidden_ND[rows], weight_VD, columns
                    )
                    continue
                of_hidden_ND[rows] += _through(found_NC, weight_VD[columns], hidden_ND.dtype)
                if of_weight_VD is not None:
                    of_weight_VD[columns].addmm_(found_NC.T, hidden_ND[rows].float())
        return of_hidden_ND.to(hidden_ND.dtype), of_weight_VD, of_bias_V, None, None, None, None, None


def _of(temperature: Temperature, rows: slice) -> Temperature:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _summary(scaled_NC: Tensor, entropy: bool) -> tuple[Tensor, Tensor | float]:
    """(logsumexp, mean under the softmax when asked) of each row of a tile."""
    top_N = scaled_NC.amax(-1).clamp_(min=torch.finfo(torch.float32).min)  # a row of -inf: no NaN
    shifted_NC = scaled_NC - top_N[:, None]
    weights_NC = shifted_NC.exp()
    sum_N = weights_NC.sum(-1)
    total_N = top_N + sum_N.log()
    if not entropy:
        return total_N, 0.0
    weighted_N = weights_NC.mul_(shifted_NC).nan_to_num_(nan=0.0).sum(-1)  # 0 times -inf is 0
    return total_N, top_N + weighted_N / sum_N


def _merged(totals_JN: Tensor, means_JN: Tensor) -> tuple[Tensor, Tensor]:
    """(logsumexp, mean under the softmax) over parts of the vocabulary."""
    # Along rows: torch adds up columns in an order that hangs on how many there are.
    totals_NJ, means_NJ = totals_JN.T.contiguous(), means_JN.T.contiguous()
    total_N = totals_NJ.logsumexp(-1)
    # A part without weight has no mean.
    mean_N = ((totals_NJ - total_N[:, None]).exp() * means_NJ).nan_to_num(nan=0.0).sum(-1)
    return total_N, mean_N


def _softmax_gradient(
    log_probs_NC: Tensor, upstream_N: Tensor, of_entropy_N: Tensor | None, entropy_N: Tensor
) -> Tensor:
    """Gradient at a tile's scaled logits, but for the chosen words' own share."""
    probs_NC = log_probs_NC.exp()
    if of_entropy_N is None:
        return probs_NC.mul_(-upstream_N[:, None])
    factor_NC = log_probs_NC.add_(entropy_N[:, None]).mul_(-of_entropy_N[:, None]).sub_(upstream_N[:, None])
    return probs_NC.mul_(factor_NC).nan_to_num_(nan=0.0)


def _add_narrow(
    of_hidden_ND: Tensor,
    of_weight_VD: Tensor | None,
    gradient_NC: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    columns: slice,
) -> None:
    """Adds what goes through a product, whose factors are bf16: the gradient at it is rounded, sums are fp32."""
    narrow_NC = gradient_NC.bfloat16()
    wide_product(narrow_NC, weight_VD[columns], of_hidden_ND)
    if of_weight_VD is not None:
        wide_product(narrow_NC.T, hidden_ND, of_weight_VD[columns])


def _through(gradient_NC: Tensor, weight_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, D) gradient behind a product with these weights; of a bf16 model in bf16, like every other layer's."""
    if dtype == weight_CD.dtype == torch.bfloat16:
        return product(gradient_NC.bfloat16(), weight_CD)
    return gradient_NC @ weight_CD.float()


@dataclass(frozen=True)
class _Chosen:
    """Which rows' tokens lie in a tile, and where (anywhere for the others)."""

    inside_NM: Tensor
    index_NM: Tensor

    @classmethod
    def of(cls, tokens_NM: Tensor, columns: slice) -> _Chosen:
        inside_NM = (tokens_NM >= columns.start) & (tokens_NM < columns.stop)
        return cls(inside_NM, (tokens_NM - columns.start).where(inside_NM, 0))


@dataclass(frozen=True)
class _Tiling:
    """How many rows and columns a tile has. `alone`: one tile holds everything, and may be kept for the backward.

    `fixed`: of as many columns, however many rows there are.
    """

    rows_in_all: int
    columns_in_all: int
    row_count: int
    column_count: int

    @classmethod
    def of(cls, hidden_ND: Tensor, weight_VD: Tensor, *, fixed: bool) -> _Tiling:
        rows, columns = len(hidden_ND), len(weight_VD)
        elements = logprobs.chunk_elements(hidden_ND.device)
        if rows * columns <= elements and not (fixed and columns > COLUMNS):
            return cls(rows, columns, max(1, rows), columns)
        count = columns
        if hidden_ND.device.type == "cpu" or fixed:
            elements, count = elements // TILES_IN_CHUNK, min(columns, TILE_COLUMNS)
        return cls(rows, columns, max(1, elements // count), count)

    @property
    def alone(self) -> bool:
        return self.rows_in_all <= self.row_count and self.columns_in_all <= self.column_count

    def rows(self) -> Iterator[slice]:
        yield from _slices(self.rows_in_all, self.row_count)

    def parts(self, head: Head) -> Iterator[tuple[Head, slice]]:
        """The head's columns of each tile, in fp32 unless products take bf16, and which they are."""
        for columns in _slices(self.columns_in_all, self.column_count):
            bias_C = None if head.bias_V is None else head.bias_V[columns]
            yield replace(head, weight_VD=head.weight_VD[columns], bias_V=bias_C).widened(), columns


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
