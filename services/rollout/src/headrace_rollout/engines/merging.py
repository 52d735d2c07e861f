"""Frozen weights and adapters as whole weights, to the bits that the trainer computes with. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from headrace_modelkit.adapters import check_adapters
from headrace_modelkit.device_memory import tensor_at
from headrace_modelkit.lora import merged_weight
from headrace_modelkit.weights import own_name
from torch import Tensor

from headrace_rollout.engines.base import Adapter, WeightEntry, Weights, WeightView


def adapted(base: Weights, adapters: Weights, scales: Mapping[str, float]) -> Weights:
    """A version of each policy's adapters, by its name, on their base.

    Raises ValueError, naming the tensor, for those of other weights, and for those of other policies than `scales`.
    """
    shapes = {entry.name: entry.shape for entry in base.entries}
    found = by_policy(adapters)
    if missing := found.keys() ^ scales.keys():
        raise ValueError(f"the adapters are not of these policies: {min(missing) or 'the own one'} differs")
    for own in found.values():
        check_adapters(shapes, {entry.name: entry.shape for entry in own.entries})
    return replace(
        base, beside={name: Adapter(own, scales[name], base.digest) for name, own in found.items()}
    )


def by_policy(weights: Weights) -> dict[str, Weights]:
    """Each policy's part of a version, by its name; "" has those that are of no other."""
    found: dict[str, list[WeightEntry]] = {}
    for entry in weights.entries:
        policy, name = own_name(entry.name)
        found.setdefault(policy, []).append(replace(entry, name=name))
    return {name: replace(weights, entries=tuple(entries)) for name, entries in found.items()}


def merged_parts(weights: Weights) -> list[WeightView]:
    """The tensors of a version, in order; those with an adapter are merged into new memory of the host."""
    return [_merged(part) if part.adapter else part for part in weights.parts()]


def _merged(view: WeightView) -> WeightView:
    data: Any = merge_into(tensor_of(view), view).flatten().view(torch.uint8).numpy()
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
