"""Adapters as a version of their own, without the frozen weights below them: their names, and both merged.

The adapter of a weight W is "W.lora_A" (R, I) and "W.lora_B" (O, R). Knows no transport and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from headrace_modelkit.experts import ADAPTER
from headrace_modelkit.lora import A, B, adapter_of, merged_weight
from headrace_modelkit.weights import CheckpointNames, Piece

Shapes = Mapping[str, tuple[int, ...]]


def names_alone(names: CheckpointNames, weights: Shapes, adapters: Shapes) -> CheckpointNames | None:
    """How a version of adapters alone names them; None where it cannot: a checkpoint has the weight in several pieces.

    `weights` are the model's, by its own names, and `adapters` their `lora_A` and `lora_B` by theirs.
    """
    layers = {adapter_of(weight): weight for weight in weights}
    found: dict[str, list[Piece]] = {}
    for name, shape in adapters.items():
        layer, _, part = name.rpartition(".")
        weight = layers.get(layer, "")
        published = names.layout([(weight, None, weights[weight])]) if weight else []
        if layer.endswith(ADAPTER) or [own for _, _, own in published] != [weights.get(weight)]:
            return None
        found[name] = [Piece(f"{published[0][0]}.{part}", 0, shape)]
    return CheckpointNames(found)


def check_adapters(base: Shapes, adapters: Shapes) -> None:
    """Raises ValueError, naming the tensor, for adapters of another model than `base`."""
    for name, shape in adapters.items():
        weight, _, part = name.rpartition(".")
        own = base.get(weight)
        beside = adapters.get(f"{weight}.{B if part == A else A}")
        if part not in (A, B) or own is None:
            raise ValueError(f"the adapters are not of this base: it has no weight for {name}")
        rank = shape[:1] if part == A else shape[-1:]
        if beside is None or len(own) != 2 or shape != ((*rank, own[1]) if part == A else (own[0], *rank)):
            raise ValueError(f"the adapters are not of this base: {name} has shape {shape}, {weight} {own}")


def merged(
    base: Iterable[tuple[str, Tensor]],
    adapters: Mapping[str, Tensor],
    scale: float,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a base, adapted ones merged to the bits that a trainer computes with, on `device` where given."""
    for name, weight in base:
        if f"{name}.{A}" not in adapters:
            yield name, weight
            continue
        place = device or weight.device
        a, b = (adapters[f"{name}.{part}"].to(place) for part in (A, B))
        yield name, merged_weight(weight.to(place), a, b, scale)
