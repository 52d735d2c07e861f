"""Products of bf16 matrices on CPUs without instructions for them: computed in fp32 and rounded once.

torch falls back to plain loops there: behind a layer of 896 x 4864 they take 4.5 s for what fp32 does in 0.02 s. A
product of bf16 matrices adds up in fp32 and rounds its result on every device, so its values stay what they are there.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override


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


class WideLayers:
    """fp32 copies of the linear layers of a bf16 model that only infers: made once a version, read for each token.

    To widen a weight takes as long as multiplying it with a few rows. Empty where the CPU multiplies bf16 itself.
    """

    def __init__(self, model: nn.Module) -> None:
        found = () if has_bf16_products() else model.modules()
        self._layers = [each for each in found if type(each) is nn.Linear]
        for layer in self._layers:
            layer.forward = MethodType(_infer, layer)  # type: ignore[method-assign]
        self.free()

    def adopt(self) -> None:
        """Takes the weights that the layers have now, into the copies that are there."""
        for layer in self._layers:
            wide: list[Tensor | None] = layer.__dict__["wide"]
            for place, part in enumerate((layer.weight, layer.bias)):
                if part is None or part.dtype != torch.bfloat16 or part.device.type != "cpu":
                    wide[place] = None
                elif (kept := wide[place]) is None:
                    wide[place] = part.detach().float()
                else:
                    kept.copy_(part)

    def free(self) -> None:
        """Drops the copies."""
        for layer in self._layers:
            layer.__dict__["wide"] = [None, None]


def _infer(layer: nn.Linear, given: Tensor) -> Tensor:
    weight, bias = layer.__dict__["wide"]
    if weight is None or given.dtype != torch.bfloat16:
        return nn.functional.linear(given, layer.weight, layer.bias)
    return nn.functional.linear(given.float(), weight, bias).bfloat16()


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
