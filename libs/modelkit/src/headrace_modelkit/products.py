"""Products on CPUs: of bf16 matrices where there are no instructions for them, and with weights that are packed once.

Without such instructions torch falls back to plain loops: behind a layer of 896 x 4864 they take 4.5 s for what fp32
does in 0.02 s. A product of bf16 matrices adds up in fp32 and rounds its result on every device, so its values stay
what they are where it is computed in fp32 and rounded once.
"""

from __future__ import annotations

from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

FEWEST_PACKED = 100_000
"""Elements of the smallest weight that is packed: a packed product costs 12 us by itself, a plain one 2."""


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


class PackedWeight:
    """`nn.functional.linear` with one weight, kept in the order in which a CPU's kernels read it.

    A plain product packs the weight at each call, which with a few rows takes as long as the product itself. Here it is
    packed once, at the first product after `adopt`, so that no install waits for it. Small weights, other types and
    other devices stay as they are.
    """

    def __init__(self) -> None:
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
        self._packs = on_cpu and known and weight.numel() >= FEWEST_PACKED and can_pack()
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
    """The linear layers of a model that only infers, with packed weights (`PackedWeight`).

    bf16 layers of a CPU that multiplies no bf16 compute in fp32: to widen a weight takes as long as multiplying it with
    a few rows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(each, PackedWeight()) for each in model.modules() if type(each) is nn.Linear]
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
