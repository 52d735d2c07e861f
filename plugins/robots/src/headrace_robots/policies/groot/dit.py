"""The action head's transformers: blocks of attention and feed-forward, with or without norms that the time sets.

Names of weights are the published ones. Shapes: B environments, T positions, N positions of the prefix, W width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAVES = 256
"""Sines and cosines of a time."""
EPSILON = 1e-5


class Dit(nn.Module):
    """Blocks of which every second one attends to its own positions, the others to the prefix: to its text, then to
    its images, in turns of so many."""

    def __init__(self, layers: int, heads: int, width: int, read: int, features: int, turn: int) -> None:
        super().__init__()
        self.turn = turn
        self.time = _Time(width)
        self.blocks = nn.ModuleList(
            GrootBlock(width, heads, read=None if index % 2 else read, timed=True) for index in range(layers)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, features)

    def forward(
        self, hidden: Tensor, time_B: Tensor, prefix_BND: Tensor, text_BN: Tensor, images_BN: Tensor
    ) -> Tensor:
        """(B, T, features) of (B, T, W); `text_BN` and `images_BN` are the positions that a block may read."""
        time_BW = self.time(time_B)
        for index, block in enumerate(self.blocks):
            seen = text_BN if index % (2 * self.turn) == 0 else images_BN
            hidden = block(hidden, time_BW, *((None, None) if index % 2 else (prefix_BND, seen)))
        shift, scale = self.proj_out_1(F.silu(time_BW))[:, None].chunk(2, -1)
        found: Tensor = self.proj_out_2(
            F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1 + scale) + shift
        )
        return found


class _Time(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(WAVES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, time_B: Tensor) -> Tensor:
        waves = sinusoids(time_B, WAVES, last=1).roll(WAVES // 2, -1)  # cosines first
        found: Tensor = self.linear_2(F.silu(self.linear_1(waves.to(self.linear_1.weight.dtype))))
        return found


class GrootBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, *, read: int | None, timed: bool) -> None:
        super().__init__()
        self.norm1 = _TimedNorm(width) if timed else nn.LayerNorm(width, eps=EPSILON)
        self.attn1 = _Attention(width, heads, read or width)
        self.norm3 = nn.LayerNorm(width, eps=EPSILON, elementwise_affine=not timed)
        self.ff = _FeedForward(width)

    def forward(
        self, hidden: Tensor, time_BW: Tensor | None, read_BND: Tensor | None, seen_BN: Tensor | None
    ) -> Tensor:
        """Attends to what is read, or to `hidden` itself; to all positions, or to those seen."""
        normed = self.norm1(hidden) if time_BW is None else self.norm1(hidden, time_BW)
        hidden = hidden + self.attn1(normed, normed if read_BND is None else read_BND, seen_BN)
        found: Tensor = hidden + self.ff(self.norm3(hidden))
        return found


class _TimedNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, hidden: Tensor, time_BW: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(time_BW))[:, None].chunk(2, -1)
        normed: Tensor = F.layer_norm(hidden, hidden.shape[-1:], eps=EPSILON) * (1 + scale) + shift
        return normed


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, read: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(read, width)
        self.to_v = nn.Linear(read, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, hidden: Tensor, read: Tensor, seen_BN: Tensor | None) -> Tensor:
        parts = (self.to_q(hidden), self.to_k(read), self.to_v(read))
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mask = None if seen_BN is None else seen_BN[:, None, None].expand(-1, 1, hidden.shape[1], -1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        found: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return found


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {"0": nn.ModuleDict({"proj": nn.Linear(width, 4 * width)}), "2": nn.Linear(4 * width, width)}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Any = self.net["0"]
        found: Tensor = self.net["2"](F.gelu(inner["proj"](hidden), approximate="tanh"))
        return found


def sinusoids(values: Tensor, size: int, *, last: int = 0) -> Tensor:
    """(…, size) fp32 sines, then cosines, of wavelengths from 2π to 10,000 times that; `last`: including it."""
    half = size // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, device=values.device) / (half - last))
    angles = values.float()[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)
