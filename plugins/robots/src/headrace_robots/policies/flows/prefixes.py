"""Keys and values of a prefix, which what stands behind it reads and leaves as they are. Knows no policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# transformers' modules are not annotated.
_CacheLayer: Any = DynamicLayer


class Prefix(DynamicCache):
    """Takes a prefix's keys and values once: a layer that is computed again, in a backward pass, adds none."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Those of the prefix alone."""
        if layer_idx == len(self.layers):
            layer = _CacheLayer()
            layer.keys, layer.values, layer.is_initialized = key_states, value_states, True
            self.layers.append(layer)
        return key_states, value_states


class Behind(DynamicCache):
    """What follows a prefix reads it and leaves it as it is."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        self.layers = prefix.layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The prefix's and these."""
        prefix: Any = self.layers[layer_idx]
        return torch.cat([prefix.keys, key_states], -2), torch.cat([prefix.values, value_states], -2)


class _GradientTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, beside: Tensor, values: Tensor) -> Tensor:
        ctx.beside = beside.shape, beside.dtype, beside.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.beside
        return torch.zeros(shape, dtype=dtype, device=device), upstream


def with_gradient_to(beside: Tensor, values: Tensor) -> Tensor:
    """`values`, whose backward pass goes through `beside` too, with a gradient of 0.

    The last layer of the prefix gives keys and values that a loss depends on, and hidden states that it may not. Who
    divides the layers over ranks gathers one when the gradient of its hidden states comes.
    """
    untyped: Any = _GradientTo
    found: Tensor = untyped.apply(beside, values)
    return found
