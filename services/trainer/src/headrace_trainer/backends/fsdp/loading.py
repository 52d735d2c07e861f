"""Fills the shards of a model that was sharded on meta, and says which box of a tensor each of them is.

Knows no files and no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from headrace_modelkit.tensor_files import Box, volume, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives what lies on meta memory on `device`, with values to be filled in; the rest stays as it is.

    The memory is not touched: on a CPU it is not resident before values come.
    """
    untyped: Any = module
    with torch.no_grad():
        untyped._apply(lambda own: torch.empty_like(own, device=device) if own.device.type == "meta" else own)


def materialise_whole(
    module: nn.Module, parameters: Iterable[nn.Parameter], device: torch.device
) -> set[nn.Parameter]:
    """As `materialise`, of parameters that are not sharded, which it replaces: those that stand in their places."""
    made = {
        id(own): nn.Parameter(
            torch.empty_like(own, device=device) if own.device.type == "meta" else own.to(device),
            requires_grad=False,
        )
        for own in parameters
    }
    for each in module.modules():
        for name, own in each.named_parameters(recurse=False, remove_duplicate=False):
            if id(own) in made:
                setattr(each, name, made[id(own)])
    return set(made.values())


def box_of(tensor: Tensor) -> Box:
    """Which part of the whole is here: of a sharded parameter its shard, of another tensor all of it."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    sizes, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(
        (min(at, size), min(at, size) + own) for at, own, size in zip(first, sizes, tensor.shape, strict=True)
    )


def local(tensor: Tensor) -> Tensor:
    """What is here of it; writing to it changes the model."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_first_copy(tensor: DTensor) -> bool:
    """Whether no rank before this one has the same shard."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        at == 0 for at, each in zip(coordinate, tensor.placements, strict=True) if isinstance(each, Replicate)
    )


def is_saved_here(tensor: Tensor, *, leads: bool) -> bool:
    """Whether this rank saves what it has of a tensor: it is a shard that no rank before has, or it leads."""
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return leads
    return bool(volume(box_of(tensor))) and is_first_copy(tensor)
