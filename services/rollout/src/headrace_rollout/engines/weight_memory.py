"""Gives a model's memory back and takes it again, and measures what that was worth."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from headrace_modelkit import devices as gpu
from headrace_modelkit.pinned import rooms_of
from headrace_modelkit.weights import load_weights, published_tensor, share_weights, state_tensors
from headrace_servicekit import failpoints
from headrace_servicekit.memory import allocator
from torch import Tensor, nn

from headrace_rollout.engines.base import WeightView
from headrace_rollout.engines.merging import merge_into, tensor_of

warnings.filterwarnings("ignore", message="The given buffer is not writable")

HOST = torch.device("cpu")


class ParameterMemory:
    """The storage of a model's weights, which can be dropped and made again on a device (values then undefined)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
        self._weights = [
            _Weight(tensor.shape, tensor.dtype, [(t, key) for t in tables for key in t if t[key] is tensor])
            for _, tensor in state_tensors(model)
        ]
        self.held = True

    def free(self) -> None:
        """Drops the storage; the model cannot run until `take` and a load."""
        for weight in self._weights:
            weight.put(torch.empty(0, dtype=weight.dtype, device=HOST))
        self.held = False

    def take(self, device: torch.device) -> None:
        """Allocates the storage again, on a device."""
        if not self.held:
            for weight in self._weights:
                weight.put(torch.empty(weight.shape, dtype=weight.dtype, device=device))
            self.held = True

    def load(self, tensors: Sequence[WeightView], device: torch.device) -> None:
        """Takes all weights, or none (ValueError).

        On the CPU the views become the weights and are referenced until the next load; a GPU gets a copy, as memory
        does that is only lent, and adapters are merged there.
        """
        views = {view.name: tensor_of(view) for view in tensors}
        adapted = [view for view in tensors if view.adapter]
        self.take(device)
        if failpoints.skips("rollout.install.load"):  # it serves other weights than it says
            self.free()
            self.take(device)
            others = {name: tensor * (1 + 2**-8) for name, tensor in views.items()}
            load_weights(self._model, others, rooms_of(device).to_device)
            return
        if device.type == "cpu" and not adapted and all(view.on_device is None for view in tensors):
            share_weights(self._model, views)
            return
        load_weights(self._model, views, rooms_of(device).to_device)
        for view in adapted:
            weight = published_tensor(self._model, view.name)
            weight.copy_(merge_into(weight, view))


@dataclass(frozen=True)
class _Weight:
    shape: torch.Size
    dtype: torch.dtype
    owners: list[tuple[dict[str, Any], str]]
    """Where modules keep it: in several places when it is tied."""

    def put(self, tensor: Tensor) -> None:
        # A new object: the device of one that is there does not change with its storage.
        (first, name), *_ = self.owners
        new = nn.Parameter(tensor, requires_grad=False) if isinstance(first[name], nn.Parameter) else tensor
        for table, key in self.owners:
            table[key] = new


def used_bytes(device: torch.device) -> int:
    """This process's memory on the device: on the host its resident set."""
    return allocator.resident_bytes() if device.type == "cpu" else gpu.used_bytes(device)


def available_bytes(device: torch.device = HOST) -> int:
    """Memory that is free for use on the device."""
    return gpu.free_bytes(device) if device.type == "cuda" else allocator.available_bytes()


def return_to_system(device: torch.device = HOST) -> None:
    """Hands freed memory back to the operating system or the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    allocator.give_freed_memory_back()
