"""A model's weights as a version that an engine installs."""

from __future__ import annotations

import torch
from headrace_modelkit.weights import copy_out, weight_layout
from headrace_rollout.engines.base import WeightEntry, Weights
from headrace_servicekit.rpc.digests import tensor_digest


def weights_of_model(model, dtype: torch.dtype = torch.float32) -> Weights:
    """All tensors of a model in one body, with their digests."""
    entries, body = [], bytearray()
    for name, kind, shape in weight_layout(model, dtype):
        data = bytearray(kind.itemsize * torch.Size(shape).numel())
        copy_out(model, name, memoryview(data), dtype)
        kind_name = str(kind).removeprefix("torch.")
        entries.append(
            WeightEntry(name, kind_name, shape, len(body), len(data), tensor_digest(memoryview(data)))
        )
        body += data
    return Weights(tuple(entries), memoryview(bytes(body)))


def weights_of_tensors(tensors: dict[str, torch.Tensor]) -> Weights:
    """These tensors in one body, with their digests."""
    entries, body = [], bytearray()
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            WeightEntry(
                name, kind, tuple(tensor.shape), len(body), len(data), tensor_digest(memoryview(data))
            )
        )
        body += data
    return Weights(tuple(entries), memoryview(bytes(body)))
