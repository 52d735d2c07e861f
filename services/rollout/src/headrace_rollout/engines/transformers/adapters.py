"""Adapters of several policies beside one model's linear layers: each row of a pass gets the product of its own.

Shapes: N rows, I inputs, O outputs, R rank. A layer's own product is of all rows; those of one adapter are grouped, and
get scale · B A x, added up in fp32 and rounded once. A merged weight is rounded by itself: the last bits differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from headrace_modelkit.weights import published_tensor
from torch import Tensor, nn

from headrace_rollout.engines.base import Adapter
from headrace_rollout.engines.merging import tensor_of

Pair = tuple[Tensor, Tensor]


class AdapterLayers:
    """The adapters of a model. Say with `of` whose rows a pass has, before it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pairs: dict[nn.Module, dict[str, Pair]] = {}
        self._groups: list[tuple[str, Tensor | None]] = []
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self._add)

    def load(self, adapters: Mapping[str, Adapter], device: torch.device) -> None:
        """Computes with these from now on; the model's weights are there. ValueError for those of no linear layer."""
        layers = {
            each.weight.data_ptr(): each for each in self._model.modules() if isinstance(each, nn.Linear)
        }
        found: dict[nn.Module, dict[str, Pair]] = {}
        for name, adapter in adapters.items():
            tensors = {view.name: tensor_of(view) for view in adapter.weights.parts()}
            for part, a_RI in tensors.items():
                weight, _, kind = part.rpartition(".")
                if kind == "lora_A":
                    layer = layers.get(published_tensor(self._model, weight).data_ptr())
                    if layer is None:
                        raise ValueError(f"{part} is of no linear layer")
                    b_OR = tensors[f"{weight}.lora_B"].to(device) * adapter.scale
                    found.setdefault(layer, {})[name] = a_RI.to(device), b_OR
        self._pairs = found

    def free(self) -> None:
        """Drops them."""
        self._pairs, self._groups = {}, []

    def of(self, names: Sequence[str], device: torch.device) -> None:
        """The next pass has a row for each of these names."""
        kinds = dict.fromkeys(names)
        if not self._pairs or len(kinds) < 2:
            self._groups = [(name, None) for name in kinds]
            return
        self._groups = [
            (kind, torch.tensor([row for row, name in enumerate(names) if name == kind], device=device))
            for kind in kinds
        ]

    def _add(self, layer: nn.Module, given: tuple[Any, ...], found_NO: Tensor) -> Tensor | None:
        pairs = self._pairs.get(layer)
        if pairs is None:
            return None
        for name, rows in self._groups:
            if name not in pairs:
                continue
            a_RI, b_OR = pairs[name]
            x_NI = given[0] if rows is None else given[0].index_select(0, rows)
            own_NO = found_NO if rows is None else found_NO.index_select(0, rows)
            low_NR = nn.functional.linear(x_NI.float(), a_RI)
            own_NO = (own_NO.float() + nn.functional.linear(low_NR, b_OR)).to(found_NO.dtype)
            found_NO = own_NO if rows is None else found_NO.index_copy(0, rows, own_NO)
        return found_NO
