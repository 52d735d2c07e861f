"""Products: of bf16 matrices where a CPU has no instructions for them, with weights that are packed once, and in tiles
of fixed shape, whose rows do not hang on each other.

Without such instructions torch falls back to plain loops: behind a layer of 896 x 4864 they take 4.5 s for what fp32
does in 0.02 s. A product of bf16 matrices adds up in fp32 and rounds its result on every device, so its values stay
what they are where it is computed in fp32 and rounded once.

Shapes: N rows, I inputs, O outputs; E experts, S rows in the order of their experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

Params = ParamSpec("Params")
Made = TypeVar("Made")
FEWEST_PACKED = 100_000
"""Elements of the smallest weight that is packed: a packed product costs 12 us by itself, a plain one 2."""
ROWS = 16
"""Rows of a tile of fixed shape: fewer cost decoding less, more cost learning less."""
COLUMNS = 2048
"""Most outputs of such a tile, which are also the words of a tile of the head."""


@cache
def can_pack() -> bool:
    """Whether torch has products with packed weights here (oneDNN)."""
    mkldnn: Any = torch.ops.mkldnn
    try:
        packed = mkldnn._reorder_linear_weight.default(torch.ones(2, 2), None)
        found: Tensor = mkldnn._linear_pointwise.default(torch.ones(1, 2), packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found == 2).all())


@cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 matrices itself (AVX-512 BF16, AMX, or AVX-512 by way of oneDNN)."""
    backend: Any = torch.backends.mkldnn
    mkldnn: Any = torch.ops.mkldnn
    return bool(backend.is_available() and mkldnn._is_mkldnn_bf16_supported())


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of one type, in that type; without a gradient of its own."""
    if left.dtype != torch.bfloat16 or left.device.type != "cpu" or has_bf16_products():
        return left @ right
    return (left.float() @ right.float()).bfloat16()


def use_fp32_products(model: nn.Module, device: torch.device) -> None:
    """Has a model's linear layers compute bf16 products in fp32, forward and backward, where the CPU needs it."""
    if device.type != "cpu" or has_bf16_products():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, given: Tensor) -> Tensor:
    if given.dtype != torch.bfloat16 or layer.weight.dtype != torch.bfloat16:
        return nn.functional.linear(given, layer.weight, layer.bias)
    found: Tensor = _Linear.apply(given, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return found


class _Forms(threading.local):
    """Of a thread: how many forms of fixed shape it computes, one inside another."""

    depth = 0


FORMS = _Forms()


def fixed_form(function: Callable[Params, Made]) -> Callable[Params, Made]:
    """Marks what computes in parts of fixed shape, for `invariant.OnlyInvariant`."""

    @wraps(function)
    def counted(*args: Params.args, **kwargs: Params.kwargs) -> Made:
        FORMS.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            FORMS.depth -= 1

    return counted


def row_products(given: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`, (…, O) of (…, I), a row of which has the same bits whatever the others are.

    torch chooses a kernel, and with it the order of the sums, by the number of rows: here that is always `ROWS`.
    """
    function: Any = _RowProducts
    found: Tensor = function.apply(given, weight_OI, bias_O)
    return found


@fixed_form
def fixed_products(given: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `row_products`, for what has no gradient."""
    rows_NI = given.reshape(-1, given.shape[-1])
    count, outputs = len(rows_NI), len(weight_OI)
    widens = given.dtype == torch.bfloat16 and given.device.type == "cpu" and not has_bf16_products()
    dtype = torch.float32 if widens else given.dtype
    rows_NI = F.pad(rows_NI, (0, 0, 0, -count % ROWS)).to(dtype)
    found_NO = given.new_empty(len(rows_NI), outputs)
    for first in range(0, outputs, COLUMNS):
        columns = slice(first, first + COLUMNS)
        weight = weight_OI[columns].to(dtype)
        bias = None if bias_O is None else bias_O[columns].to(dtype)
        for start in range(0, count, ROWS):
            rows = slice(start, start + ROWS)
            found_NO[rows, columns] = F.linear(rows_NI[rows], weight, bias)
    return found_NO[:count].view(*given.shape[:-1], outputs)


def grouped_row_products(rows_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """(S, O) by `row_products`, each expert's by itself; `ends_E` is the place behind its last row."""
    found, first = [], 0
    for weight_OI, end in zip(weight_EOI, ends_E.tolist(), strict=True):
        found.append(row_products(rows_SI[first:end], weight_OI))
        first = end
    return torch.cat(found)


class _RowProducts(torch.autograd.Function):
    """The gradient is a plain product's: nothing compares its bits."""

    @staticmethod
    @override
    def forward(ctx: Any, given: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight_OI)
        return fixed_products(given, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given, weight_OI = ctx.saved_tensors
        of_NO = upstream.reshape(-1, upstream.shape[-1])
        before = own = bias = None
        if ctx.needs_input_grad[0]:
            before = product(of_NO, weight_OI).view_as(given)
        if ctx.needs_input_grad[1]:
            own = product(of_NO.t(), given.reshape(-1, given.shape[-1]))
        if ctx.needs_input_grad[2]:
            bias = of_NO.sum(0)
        return before, own, bias


class PackedWeight:
    """`nn.functional.linear` with one weight, kept in the order in which a CPU's kernels read it.

    A plain product packs the weight at each call, which with a few rows takes as long as the product itself. Here it is
    packed once, at the first product after `adopt`, so that no install waits for it. Small weights, other types and
    other devices stay as they are, and with `fixed` all: these are multiplied by `fixed_products`.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._ready: Tensor | None = None
        self._dtype, self._packs = torch.float32, False

    def adopt(self, weight: Tensor, bias: Tensor | None, *, wide: bool) -> None:
        """Multiplies with this weight (out, in) from now on; on a CPU in fp32 if it is bf16 and `wide`."""
        self.free()
        on_cpu = weight.device.type == "cpu"
        widens = wide and on_cpu and weight.dtype == torch.bfloat16
        self._dtype = torch.float32 if widens else weight.dtype
        known = self._dtype in (torch.float32, torch.bfloat16)
        small = weight.numel() < FEWEST_PACKED or self._fixed
        self._packs = on_cpu and known and not small and can_pack()
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().to(self._dtype)
        if not self._packs and self._dtype == weight.dtype:
            self._ready = self._weight

    def free(self) -> None:
        """Drops the weight and what was made of it."""
        self._weight = self._bias = self._ready = None

    @property
    def missing_bytes(self) -> int:
        """What the first product will take."""
        if self._weight is None or self._ready is not None:
            return 0
        return self._weight.numel() * self._dtype.itemsize

    def __call__(self, given: Tensor) -> Tensor:
        """(..., out) of (..., in), in the type that is multiplied in."""
        ready = self._ready
        if ready is None:
            ready = self._make()
        given = given.to(self._dtype)
        if self._fixed:
            return fixed_products(given, ready, self._bias)
        if not self._packs:
            return nn.functional.linear(given, ready, self._bias)
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(given, ready, self._bias, "none", [], "")
        return found

    def _make(self) -> Tensor:
        assert self._weight is not None, "adopt comes first"
        ready = self._weight.to(self._dtype)
        if self._packs:
            ready = torch.ops.mkldnn._reorder_linear_weight.default(ready, None)
        self._ready = ready
        return ready


class PackedLayers:
    """The linear layers of a model that only infers, with packed weights (`PackedWeight`), or `fixed` products.

    bf16 layers of a CPU that multiplies no bf16 compute in fp32: to widen a weight takes as long as multiplying it with
    a few rows.
    """

    def __init__(self, model: nn.Module, *, fixed: bool = False) -> None:
        self._layers = [
            (each, PackedWeight(fixed=fixed)) for each in model.modules() if type(each) is nn.Linear
        ]
        for layer, packed in self._layers:
            layer.forward = partial(_infer, packed)  # type: ignore[method-assign]

    def adopt(self) -> None:
        """Takes the weights that the layers have now."""
        for layer, packed in self._layers:
            packed.adopt(layer.weight, layer.bias, wide=not has_bf16_products())

    def free(self) -> None:
        """Drops what was made of them."""
        for _, packed in self._layers:
            packed.free()

    @property
    def missing_bytes(self) -> int:
        """What the first pass will take."""
        return sum(packed.missing_bytes for _, packed in self._layers)


def _infer(packed: PackedWeight, given: Tensor) -> Tensor:
    return packed(given).to(given.dtype)


class _Linear(torch.autograd.Function):
    """`nn.functional.linear` of bf16 tensors, all three of its products in fp32."""

    @staticmethod
    @override
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        wide = None if bias is None else bias.float()
        return nn.functional.linear(given.float(), weight.float(), wide).bfloat16()

    @staticmethod
    @override
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        wide = upstream[0].float()
        rows = wide.reshape(-1, wide.shape[-1])
        before = (wide @ weight.float()).bfloat16() if ctx.needs_input_grad[0] else None
        own = None
        if ctx.needs_input_grad[1]:
            own = (rows.t() @ given.float().reshape(-1, given.shape[-1])).bfloat16()
        bias = rows.sum(0).bfloat16() if ctx.needs_input_grad[2] else None
        return before, own, bias
