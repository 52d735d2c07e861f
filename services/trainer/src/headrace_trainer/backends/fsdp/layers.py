"""How the layers of a rank's models are computed: compiled or as they are written, and what a backward pass does again.

Knows no sharding and no step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from headrace_trainer.backends.fsdp.attending.prefixes import KEPT, Kept
from headrace_trainer.backends.fsdp.loading import layers_of

SMALLEST_AWAY = 1 << 16
"""Bytes below which a tensor is not worth its way to the host."""


def kept_on_host(device: torch.device) -> AbstractContextManager[object]:
    """Of a forward within it, what autograd keeps lies in host memory until the backward pass asks for it.

    Of layers that are computed again that is their inputs. A copy waits for nobody: the device's stream orders it with
    what it computes.
    """

    def pack(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.nbytes < SMALLEST_AWAY:
            return tensor
        away = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=device.type == "cuda")
        return away.copy_(tensor, non_blocking=True)

    return saved_tensors_hooks(pack, lambda kept: kept.to(device, non_blocking=True))


class Layers:
    """Of the policy and of its critic's body, where that has one."""

    def __init__(self, bodies: Many[PreTrainedModel]) -> None:
        self.bodies = bodies
        self._kept: dict[nn.Module, Kept] = {}

    def recompute(self) -> None:
        """In the backward pass, from each layer's input."""
        for body in self.bodies:
            untyped: Any = body
            untyped.gradient_checkpointing_enable({"use_reentrant": False})
            body.train()  # transformers checkpoints in training mode only; modelkit has turned dropout off

    def keep_attention(self) -> None:
        """Lets layers that are computed again keep what attention's kernel gave."""
        layers = [layer for body in self.bodies for layer in layers_of(body)]
        attending = [each for layer in layers for each in layer.modules() if hasattr(each, "layer_idx")]
        self._kept = {module: Kept() for module in attending}
        for module, kept in self._kept.items():
            setattr(module, KEPT, kept)

    def compute_attention_again(self) -> None:
        """Undoes it."""
        for module in self._kept:
            delattr(module, KEPT)
        self._kept = {}

    def drop_kept(self) -> None:
        """Where no backward pass follows a forward."""
        for kept in self._kept.values():
            kept.drop()

    def compile(self, body: PreTrainedModel) -> None:
        """Has torch compile the forward of each layer for rows of any length; fully_shard's hooks stay outside.

        Layers of a class share what is compiled: a model of many takes as long at first as one of a few.
        """
        compiled: dict[type, Any] = {}
        for layer in layers_of(body):
            kind = type(layer)
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, dynamic=True)
            layer.forward = MethodType(compiled[kind], layer)  # type: ignore[method-assign]
