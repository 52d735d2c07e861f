"""Forms of a model's operations whose bits for a row follow from that row alone, whatever is computed beside it.

torch chooses kernels, and with them the order of a sum, by the shape of the whole: a product of one row is not that
row's of the product of a hundred, and attention over 40 keys not that over 40 and 24 hidden ones. Here every sum is
made of parts of fixed shape in a fixed order. With them the built-in engine's prefill and decode and the trainer's
forward give one token the same log-prob, to the bit (He et al. 2025, "Defeating Nondeterminism in LLM Inference").

Held on one thread of a CPU, where the other operations of these models treat each row alike: normalisation, softmax,
cumulated sums, cos and sin. Knows no engine and no trainer.

Shapes: B sequences, H heads, G key heads, T queries, L keys, D head dimension; S sets of queries that read the same
keys, Q queries of such a set, the heads of one token after another; P tiles of queries, K keys of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import AttentionMaskInterface
from typing_extensions import override

from headrace_modelkit.products import FORMS, ROWS, fixed_form, row_products

NAME = "invariant"
"""Of the attention, in transformers' table."""
KEYS = 64
"""Keys of one part of attention."""
WIDTH = 64
"""Activations get rows of a multiple: torch computes what is behind the last full register by another function."""
SCORES = 1 << 24
"""Scores that exist at a time."""
_MARK = "headrace_invariant"
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def make_invariant(model: PreTrainedModel) -> None:
    """Has a model compute by these forms, once. Raises ValueError for one that cannot, with the reason."""
    if reason := obstacle(model.config):
        raise ValueError(reason)
    if not model._supports_attention_backend:
        raise ValueError("its attention is of its own class")
    activations = {type(made) for made in (ACT2FN[name] for name in ACT2FN) if isinstance(made, nn.Module)}
    for module in model.modules():
        setattr(module, _MARK, True)
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]
        elif type(module) in activations:
            module.forward = MethodType(_activation, module)  # type: ignore[method-assign]
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.config.get_text_config()._attn_implementation = NAME


def is_invariant(module: nn.Module | None) -> bool:
    """Whether a module is part of a model that `make_invariant` was given."""
    return getattr(module, _MARK, False)


@contextmanager
def plain_attention(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """In the body those of the models that attend by this module attend as torch does, to be compared with it."""
    texts: list[Any] = [model.config.get_text_config() for model in models]
    changed = [text for text in texts if text._attn_implementation == NAME]
    for text in changed:
        text._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for text in changed:
            text._attn_implementation = NAME


class Varies(Exception):
    """A model computes something whose bits hang on the batch; the message is its end of a sentence."""


class OnlyInvariant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its body, of what a model computes outside these forms, products and activations raise `Varies`.

    torch has other operations whose sums hang on the shape; no model whose products are all linear layers has them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.overloadpacket).partition(".")[2]
        if not FORMS.depth:
            # Positions times frequencies have one factor each: nothing is added up.
            sums = name in _PRODUCTS and not (name in _PLAIN and args[0].shape[-1] == 1)
            cut = name in _CUT and args[0].shape[-1] % WIDTH
            if sums or cut or func.namespace != "aten":
                raise Varies(
                    f"it computes {name} outside a linear layer, attention or an activation of its own"
                )
        return func(*args, **(kwargs or {}))


_PLAIN = frozenset({"mm", "bmm", "matmul"})
_PRODUCTS = _PLAIN | {
    *("linear", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "einsum", "grouped_mm", "_grouped_mm"),
    *("convolution", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
_CUT = frozenset({"silu", "sigmoid", "gelu", "mish", "softplus", "hardswish", "elu"})
"""Those that torch computes by another function behind the last full register."""


def obstacle(architecture: PreTrainedConfig) -> str:
    """What a model does by the length of the whole batch; empty where it does nothing of the kind."""
    text: Any = architecture.get_text_config()
    kinds = [getattr(text, "rope_parameters", None) or {}, getattr(text, "rope_scaling", None) or {}]
    for kind in kinds:
        found = kind.get("rope_type", kind.get("type"))
        if found in _LENGTH_DEPENDENT:
            return f"its positions are scaled by the longest sequence of a batch ({found} rope)"
    return ""


def _linear(layer: nn.Linear, given: Tensor) -> Tensor:
    return row_products(given, layer.weight, layer.bias)


def _activation(module: nn.Module, given: Tensor) -> Tensor:
    width = given.shape[-1]
    forward: Any = type(module).forward
    found: Tensor = forward(module, F.pad(given, (0, -width % WIDTH)).contiguous())
    return found[..., :width]


# Attention


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: (B, T, H, D) of (B, H, T, D), (B, G, L, D), in fp32, then rounded.

    Key l is the l-th token of its sequence; without a mask query t sees those up to t, with one, (B, 1, T, L), those
    where it is 0. What lies behind the keys that a query sees changes no bit of it.
    """
    function: Any = _Attention
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    hidden = None if attention_mask is None else _hidden(attention_mask)
    found = function.apply(query.float(), key.float(), value.float(), hidden, scale)
    return found.to(query.dtype), None


def _hidden(mask_B1TL: Tensor) -> Tensor:
    """(B, T, L): which keys a query does not see."""
    mask_BTL = mask_B1TL[:, 0]
    return ~mask_BTL if mask_BTL.dtype == torch.bool else mask_BTL < 0


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows are padded behind their ends, where a causal model does not look."""


class _Attention(torch.autograd.Function):
    """Parts of `ROWS` queries by `KEYS` keys; the highest score of all parts comes first, so none is scaled again.

    A part that is hidden adds 0 to sums that are already there. The backward pass has no fixed shapes.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden_BTL: Tensor | None, scale: float
    ) -> Tensor:
        batch, heads, length, _ = query.shape
        groups = key.shape[1]
        query_SQD = _in_sets(query * scale, groups)
        count = query_SQD.shape[1]
        query_SQD = F.pad(query_SQD, (0, 0, 0, -count % ROWS))
        found, sums = [], []
        for first, end in _bands(query_SQD.shape[0], query_SQD.shape[1], key.shape[2]):
            hidden = _of_band(hidden_BTL, groups, heads // groups, first, end, key)
            seen = partial(_first_of, hidden_BTL is None, heads // groups, first)
            out, total = _band(query_SQD[:, first:end], key.flatten(0, 1), value.flatten(0, 1), hidden, seen)
            found.append(out)
            sums.append(total)
        out_SQD = torch.cat(found, 1)[:, :count]
        ctx.save_for_backward(query, key, value, out_SQD, torch.cat(sums, 1)[:, :count], hidden_BTL)
        ctx.scale = scale
        shaped = out_SQD.view(batch, groups, length, heads // groups, value.shape[-1])
        return shaped.transpose(1, 2).reshape(batch, length, heads, value.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_SQD, total_SQ, hidden_BTL = ctx.saved_tensors
        (batch, heads, length, _), groups = query.shape, key.shape[1]
        query_SQD, keys_SLD, values_SLD = _in_sets(query, groups), key.flatten(0, 1), value.flatten(0, 1)
        given_SQD = _in_sets(upstream.transpose(1, 2), groups)
        of_query, of_keys, of_values = map(torch.zeros_like, (query_SQD, keys_SLD, values_SLD))
        for first, end in _bands(query_SQD.shape[0], query_SQD.shape[1], key.shape[2]):
            band = slice(first, end)
            hidden = _of_band(hidden_BTL, groups, heads // groups, first, end, key)
            scores_SQL = query_SQD[:, band] @ keys_SLD.transpose(1, 2) * ctx.scale
            scores_SQL.masked_fill_(hidden, float("-inf"))
            shares_SQL = scores_SQL.sub_(total_SQ[:, band, None]).exp_()
            of_values += shares_SQL.transpose(1, 2) @ given_SQD[:, band]
            through_SQL = given_SQD[:, band] @ values_SLD.transpose(1, 2)
            through_SQL -= (given_SQD[:, band] * out_SQD[:, band]).sum(-1, keepdim=True)
            of_scores_SQL = through_SQL.mul_(shares_SQL).mul_(ctx.scale)
            of_query[:, band] = of_scores_SQL @ keys_SLD
            of_keys += of_scores_SQL.transpose(1, 2) @ query_SQD[:, band]
        shaped = of_query.view(batch, groups, length, heads // groups, -1).transpose(2, 3)
        return shaped.reshape_as(query), of_keys.view_as(key), of_values.view_as(value), None, None


def _in_sets(query_BHTD: Tensor, groups: int) -> Tensor:
    """(S, Q, D): the queries that read the same keys, token by token."""
    batch, heads, length, width = query_BHTD.shape
    shaped = query_BHTD.reshape(batch, groups, heads // groups, length, width)
    return shaped.transpose(2, 3).reshape(batch * groups, length * (heads // groups), width)


def _bands(sets: int, queries: int, keys: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries, whole tiles each, so that all their scores are few enough."""
    size = max(1, SCORES // (sets * max(keys, KEYS) * ROWS)) * ROWS
    for first in range(0, queries, size):
        yield first, min(first + size, queries)


def _of_band(
    hidden_BTL: Tensor | None, groups: int, together: int, first: int, end: int, key: Tensor
) -> Tensor:
    """(S or 1, queries, L): which keys the queries from `first` to `end` do not see, `together` of them one token."""
    place_Q = torch.arange(first, end, device=key.device) // together
    if hidden_BTL is None:
        return (torch.arange(key.shape[2], device=key.device) > place_Q[:, None])[None]
    place_Q = place_Q.clamp_(
        max=hidden_BTL.shape[1] - 1
    )  # what fills the last tile sees what the last query does
    return hidden_BTL.index_select(1, place_Q).repeat_interleave(groups, 0)


def _first_of(causal: bool, together: int, first: int, start: int) -> int:
    """Which query of a band that begins with `first` sees the key `start` before all others."""
    return max(0, start * together - first) if causal else 0


@fixed_form
def _band(
    query_SQD: Tensor, key_SLD: Tensor, value_SLD: Tensor, hidden_SQL: Tensor, first_of: Callable[[int], int]
) -> tuple[Tensor, Tensor]:
    """(S, Q, D) and the logarithm of each query's sum, (S, Q); `first_of` says which query sees a part first."""
    sets, queries, _ = query_SQD.shape
    parts = []
    for start in range(0, key_SLD.shape[1], KEYS):
        first = first_of(start) // ROWS * ROWS
        if first >= queries:
            break
        hidden_SQK = hidden_SQL[:, first:, start : start + KEYS]
        hidden_SQK = F.pad(hidden_SQK, (0, KEYS - hidden_SQK.shape[-1]), value=True)
        scores_SQK = _products(query_SQD[:, first:], _part(key_SLD, start).transpose(1, 2))
        parts.append((first, start, scores_SQK.masked_fill_(hidden_SQK, float("-inf"))))
    top_SQ = query_SQD.new_full((sets, queries), float("-inf"))
    for first, _, scores_SQK in parts:
        top_SQ[:, first:] = torch.maximum(top_SQ[:, first:], scores_SQK.amax(-1))
    total_SQ = torch.zeros_like(top_SQ)
    out_SQD = query_SQD.new_zeros(sets, queries, value_SLD.shape[-1])
    for first, start, scores_SQK in parts:
        shares_SQK = scores_SQK.sub_(top_SQ[:, first:, None]).exp_()
        total_SQ[:, first:] += shares_SQK.sum(-1)
        out_SQD[:, first:] += _products(shares_SQK, _part(value_SLD, start))
    return out_SQD / total_SQ[..., None], top_SQ + total_SQ.log()


def _part(whole_SLD: Tensor, start: int) -> Tensor:
    """(S, KEYS, D), with zeros behind the last key."""
    part_SKD = whole_SLD[:, start : start + KEYS]
    short = KEYS - part_SKD.shape[1]
    return F.pad(part_SKD, (0, 0, 0, short)) if short else part_SKD


def _products(left_SQX: Tensor, right_SXY: Tensor) -> Tensor:
    """(S, Q, Y), a tile of rows at a time."""
    sets, queries, width = left_SQX.shape
    tiles = queries // ROWS
    left_PRX = left_SQX.reshape(sets * tiles, ROWS, width)
    if tiles > 1:
        right_SXY = right_SXY.unsqueeze(1).expand(-1, tiles, -1, -1).flatten(0, 1)
    return torch.bmm(left_PRX, right_SXY).view(sets, queries, right_SXY.shape[-1])
