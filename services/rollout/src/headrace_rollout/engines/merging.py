"""Frozen weights and adapters as whole weights, to the bits that the trainer computes with. Knows no engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from headrace_modelkit.adapters import check_adapters
from headrace_modelkit.device_memory import tensor_at
from headrace_modelkit.lora import merged_weight
from torch import Tensor

from headrace_rollout.engines.base import Adapter, Weights, WeightView


def adapted(base: Weights, adapters: Weights, scale: float) -> Weights:
    """A version of adapters on their base. Raises ValueError, naming the tensor, for those of other weights."""
    own, beside = ({entry.name: entry.shape for entry in each.entries} for each in (base, adapters))
    check_adapters(own, beside)
    return replace(base, adapter=Adapter(adapters, scale))


def merged_view(view: WeightView) -> WeightView:
    """A frozen weight with its adapter, in new memory of the host."""
    whole = merge_into(tensor_of(view), view)
    data: Any = whole.flatten().view(torch.uint8).numpy()
    return WeightView(view.name, view.dtype, view.shape, memoryview(data))


def merge_into(weight: Tensor, view: WeightView) -> Tensor:
    """A frozen weight, wherever it lies, with the view's adapter, if it has one: there, and in its type."""
    if view.adapter is None:
        return weight
    *parts, scale = view.adapter
    a, b = (tensor_of(each).to(weight.device) for each in parts)
    return merged_weight(weight, a, b, scale)


def tensor_of(view: WeightView) -> Tensor:
    """The view's bytes as a tensor of the GPU that has them, else of the host: without a copy where they lie even."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    if view.on_device is not None:
        return tensor_at(view.on_device, view.dtype, view.shape, 0, len(view.data))
    if 0 in view.shape:
        return torch.empty(view.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(view.data, dtype=dtype).view(view.shape)
