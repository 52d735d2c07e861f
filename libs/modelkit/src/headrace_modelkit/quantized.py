"""Frozen weights of linear layers in a byte or half of one: codes, with a scale a block, decoded for each product.

`nf4` has the 16 quantiles of QLoRA (arXiv 2305.14314), two codes a byte. Knows no adapter and no sharding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Elements with one fp32 scale."""
PART = 1 << 22
"""Elements that are decoded at a time: what exists of them besides."""
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def quantized_bytes(elements: int, form: str) -> int:
    """Of a weight's codes and scales."""
    return (-(-elements // 2) if form == "nf4" else elements) + 4 * -(-elements // BLOCK)


class QuantizedWeight(nn.Module):
    """A weight (O, I) by its codes; `take` fills it, `whole` gives it back in the type that it had."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight_OI: Tensor, form: str) -> None:
        super().__init__()
        self.form, self.shape, self.dtype = form, tuple(weight_OI.shape), weight_OI.dtype
        elements = weight_OI.numel()
        place: Any = {"device": weight_OI.device}
        codes = torch.empty(-(-elements // 2) if form == "nf4" else elements, dtype=torch.uint8, **place)
        self.register_buffer("codes", codes, persistent=False)
        scales = torch.empty(-(-elements // BLOCK), dtype=torch.float32, **place)
        self.register_buffer("scales", scales, persistent=False)

    def take(self, weight_OI: Tensor) -> None:
        """Keeps the nearest codes of these values."""
        flat, step = weight_OI.reshape(-1), PART
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step].to(self.codes.device, torch.float32)
            blocks = F.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
            scales = blocks.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
            codes = _coded(blocks / scales[:, None], self.form).flatten()[: part.numel()]
            if self.form == "nf4":
                pairs = F.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
                codes, first = pairs[:, 0] << 4 | pairs[:, 1], first // 2
            self.codes[first : first + codes.numel()] = codes
            at = first * (2 if self.form == "nf4" else 1) // BLOCK
            self.scales[at : at + len(scales)] = scales

    def whole(self) -> Tensor:
        """(O, I)."""
        elements = self.shape[0] * self.shape[1]
        found = torch.empty(elements, dtype=self.dtype, device=self.codes.device)
        for first in range(0, elements, PART):
            end = min(first + PART, elements)
            if self.form == "nf4":
                codes = self.codes[first // 2 : -(-end // 2)]
                values = _table(codes.device)[torch.stack([codes >> 4, codes & 15], 1).flatten().int()]
            elif self.form == "int8":
                values = self.codes[first:end].view(torch.int8).float() / _LARGEST["int8"]
            else:
                values = self.codes[first:end].view(torch.float8_e4m3fn).float() / _LARGEST["fp8"]
            values = values[: end - first]
            blocks = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
            blocks = blocks * self.scales[first // BLOCK : -(-end // BLOCK), None]
            found[first:end] = blocks.flatten()[: end - first].to(self.dtype)
        return found.view(self.shape)


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """(…, O) of (…, I): with the decoded weight, of which nothing is kept for the backward pass."""
    function: Any = _Product
    found: Tensor = function.apply(x, weight, bias)
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (upstream @ ctx.weight.whole() if ctx.needs_input_grad[0] else None), None, None


def _coded(values: Tensor, form: str) -> Tensor:
    """Codes of values from -1 to 1."""
    if form == "nf4":
        table = _table(values.device)
        return torch.bucketize(values, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    scaled = values * _LARGEST[form]
    own = scaled.round().to(torch.int8) if form == "int8" else scaled.to(torch.float8_e4m3fn)
    return own.view(torch.uint8)


def _table(device: torch.device) -> Tensor:
    return torch.tensor(_NF4, dtype=torch.float32, device=device)
