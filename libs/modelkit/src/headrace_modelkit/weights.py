"""Weights in one canonical order: what a published version holds and how it gets in and out of a model.

A model is any torch module: a language model or a robot policy.
Tied weights appear once, under the name that Hugging Face saves. Knows no transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headrace_modelkit.tensor_files import Tensors

ALIGNMENT_BYTES = 16
"""Of tensors that are used where they are: what vector instructions like to read."""


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and persistent buffer, parameters first, tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def weight_layout(model: nn.Module, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, type, shape) in canonical order. Parameters travel in `dtype`, buffers in their own type."""
    return [(name, _travel_type(tensor, dtype), tuple(tensor.shape)) for name, tensor in state_tensors(model)]


def copy_out(model: nn.Module, name: str, out: memoryview, dtype: torch.dtype) -> None:
    """Writes one tensor of the layout into `out`, cast as the layout says. Raises KeyError on other names."""
    tensor = _named(model)[name]
    travel = _travel_type(tensor, dtype)
    if tensor.numel():
        flat = torch.frombuffer(out, dtype=travel, count=tensor.numel())
        flat.view(tensor.shape).copy_(tensor.detach())


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies a whole version into the model, cast to the model's types.

    Raises ValueError, before anything is written, when names or shapes are not the model's own.
    """
    own = _named(model)
    if problem := _difference(_shapes(own), _shapes(tensors)):
        raise ValueError(f"the weights are not this model's: {problem}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def read_weights(model: nn.Module, tensors: Tensors) -> None:
    """As `load_weights`, of tensors that are read one after another."""
    own = _named(model)
    if problem := _difference(_shapes(own), {name: tensors.shape(name) for name in tensors.names()}):
        raise ValueError(f"the weights are not this model's: {problem}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors.read(name))


def share_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """As `load_weights`, for a model that only reads: tensors of its own types become its weights, without a copy.

    They may be read-only; the model keeps what they are views of. Odd addresses and other types are copied.
    """
    own = _named(model)
    if problem := _difference(_shapes(own), _shapes(tensors)):
        raise ValueError(f"the weights are not this model's: {problem}")
    for name, tensor in own.items():
        given = tensors[name]
        fits = given.dtype == tensor.dtype and given.device == tensor.device
        aligned = given.data_ptr() % ALIGNMENT_BYTES == 0 and given.is_contiguous()
        tensor.data = given if fits and aligned else given.to(tensor, copy=True)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(state_tensors(model))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _difference(own: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> str:
    if missing := own.keys() - given.keys():
        return f"{len(missing)} missing, first {min(missing)}"
    if extra := given.keys() - own.keys():
        return f"{len(extra)} unknown, first {min(extra)}"
    for name, shape in own.items():
        if shape != given[name]:
            return f"{name} has shape {given[name]}, not {shape}"
    return ""


def _travel_type(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
