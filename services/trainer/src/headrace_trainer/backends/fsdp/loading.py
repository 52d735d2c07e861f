"""Between the shards of a model that was sharded on meta and whole tensors: fills them, and copies them to the host.

Knows no files and no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from headrace_modelkit.families.mixtures import own_modules
from headrace_modelkit.tensor_files import Box, volume, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel


def layers_of(model: PreTrainedModel | None) -> list[nn.Module]:
    """The layers that are gathered one after another: of what a class names, the innermost."""
    if model is None:
        return []
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in own_modules(model) if type(module).__name__ in kinds]
    return [module for module in found if sum(type(each).__name__ in kinds for each in module.modules()) == 1]


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


class HostCopies:
    """Two buffers that stay, in memory that a GPU copies into by itself; each is as large as its largest tensor."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copies in order; each holds until the next one is asked for."""
        before: tuple[str, Tensor, torch.cuda.Event | None] | None = None
        for index, (name, tensor) in enumerate(tensors):
            copy = self._room(index % 2, tensor)
            copy.copy_(tensor, non_blocking=self._pins)
            done = torch.cuda.Event() if self._pins else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record(torch.cuda.current_stream(tensor.device))
            if before is not None:
                yield _awaited(*before)
            before = name, copy, done
        if before is not None:
            yield _awaited(*before)

    def _room(self, index: int, like: Tensor) -> Tensor:
        if self._buffers[index].nbytes < like.nbytes:
            self._buffers[index] = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=self._pins)
        return self._buffers[index][: like.nbytes].view(like.dtype).view(like.shape)


def _awaited(name: str, copy: Tensor, done: torch.cuda.Event | None) -> tuple[str, Tensor]:
    if done is not None:
        done.synchronize()
    return name, copy
