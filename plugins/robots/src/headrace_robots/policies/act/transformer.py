"""ACT's transformer: positions are added to queries and keys in every layer. Names are LeRobot's.

Shapes: B rows, N tokens, M tokens that are attended to, D hidden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """As nn.MultiheadAttention names its weights; its output layer is one that adapters can stand beside."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, queries_BND: Tensor, keys_BMD: Tensor, values_BMD: Tensor) -> Tensor:
        """(B, N, D)."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        given = (queries_BND, keys_BMD, values_BMD)
        queries, keys, values = (
            F.linear(each, weight, bias).view(*each.shape[:2], self.heads, -1).transpose(1, 2)
            for each, weight, bias in zip(given, weights, biases, strict=True)
        )
        found: Tensor = self.out_proj(
            F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        )
        return found


class _Layer(nn.Module):
    """Residual steps, each with its norm before or behind it."""

    def __init__(self, config: Any, steps: int) -> None:
        super().__init__()
        size = config.dim_model
        self.self_attn = Attention(size, config.n_heads)
        self.linear1 = nn.Linear(size, config.dim_feedforward)
        self.linear2 = nn.Linear(config.dim_feedforward, size)
        for number in range(1, steps + 1):
            setattr(self, f"norm{number}", nn.LayerNorm(size))
        self.pre_norm = config.pre_norm
        self.activation = F.relu if config.feedforward_activation == "relu" else F.gelu

    def _added(self, norm: nn.Module, hidden: Tensor, step: Any) -> Tensor:
        if self.pre_norm:
            found: Tensor = hidden + step(norm(hidden))
        else:
            found = norm(hidden + step(hidden))
        return found

    def _fed(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear2(self.activation(self.linear1(hidden)))
        return found


class EncoderLayer(_Layer):
    """Self-attention and feed-forward."""

    norm1: nn.Module
    norm2: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config, 2)

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """(B, M, D)."""
        hidden = self._added(
            self.norm1, hidden, lambda normed: self.self_attn(normed + places, normed + places, normed)
        )
        return self._added(self.norm2, hidden, self._fed)


class VaeLayer(EncoderLayer):
    """A layer that cloning alone goes through."""


class DecoderLayer(_Layer):
    """Self-attention, attention to the encoder, and feed-forward."""

    norm1: nn.Module
    norm2: nn.Module
    norm3: nn.Module

    def __init__(self, config: Any) -> None:
        super().__init__(config, 3)
        self.multihead_attn = Attention(config.dim_model, config.n_heads)

    def forward(self, hidden: Tensor, own: Tensor, seen: Tensor, places: Tensor) -> Tensor:
        """(B, N, D); `own` are the positions of queries, `places` those of what is seen."""
        hidden = self._added(
            self.norm1, hidden, lambda normed: self.self_attn(normed + own, normed + own, normed)
        )
        hidden = self._added(
            self.norm2, hidden, lambda normed: self.multihead_attn(normed + own, seen + places, seen)
        )
        return self._added(self.norm3, hidden, self._fed)


class Encoder(nn.Module):
    """Layers over all tokens."""

    def __init__(self, config: Any, layers: int, kind: type[EncoderLayer] = EncoderLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(config) for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, hidden: Tensor, places: Tensor) -> Tensor:
        """(B, M, D) of tokens and their (M, D) positions."""
        for layer in self.layers:
            hidden = layer(hidden, places)
        found: Tensor = self.norm(hidden)
        return found


class Decoder(nn.Module):
    """Layers whose queries are positions alone."""

    def __init__(self, config: Any, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(self, seen: Tensor, places: Tensor, own: Tensor) -> Tensor:
        """(B, H, D) for the (H, D) positions `own`."""
        hidden = seen.new_zeros(len(seen), *own.shape)
        for layer in self.layers:
            hidden = layer(hidden, own, seen, places)
        found: Tensor = self.norm(hidden)
        return found


def waves(places: int, size: int) -> Tensor:
    """(places, size) sines at even and cosines at odd numbers, of Attention is All You Need."""
    numbers = torch.arange(size, dtype=torch.float64)
    angles = torch.arange(places, dtype=torch.float64)[:, None] / 10000 ** (2 * (numbers // 2) / size)
    return torch.where(numbers % 2 == 0, angles.sin(), angles.cos()).float()


def plane_waves(height: int, width: int, size: int) -> Tensor:
    """(height × width, size): rows in the first half, columns in the second, each over a whole turn."""
    half = size // 2
    numbers = torch.arange(half, dtype=torch.float32)
    periods = 10000 ** (2 * (numbers // 2) / half)

    def along(count: int) -> Tensor:
        turns = torch.arange(1, count + 1, dtype=torch.float32) / (count + 1e-6) * 2 * math.pi
        angles = turns[:, None] / periods
        return torch.where(numbers % 2 == 0, angles.sin(), angles.cos())

    rows = along(height)[:, None].expand(-1, width, -1)
    columns = along(width)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)
