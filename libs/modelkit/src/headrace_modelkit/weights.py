"""Weights in one canonical order: what a published version holds and how it gets in and out of a model.

A model is any torch module: a language model or a robot policy. Tied weights appear once, under the name that Hugging
Face saves. A version names them as the model's checkpoint does, where transformers computes with other tensors: a layer
of experts is one tensor there and one for each expert here. Knows no transport.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

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


def below(policy: str, name: str) -> str:
    """How a run with several policies calls a tensor of one of them; "" is its own, whose names stay as they are."""
    return f"{policy}/{name}" if policy else name


def own_name(name: str) -> tuple[str, str]:
    """Policy and tensor's own name of what `below` made."""
    policy, _, own = name.rpartition("/")
    return policy, own


Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint: rows from `first` on of one of the model's, its leading dimensions counted as one."""

    name: str
    first: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The piece of the model's tensor: a view where that is contiguous."""
        if tuple(whole.shape) == self.shape:
            return whole
        rows = whole.flatten(0, -2)[self.first : self.first + math.prod(self.shape[:-1])]
        return rows.view(self.shape)


class CheckpointNames:
    """How a checkpoint names a model's tensors, by the conversion that transformers' `save_pretrained` makes.

    A tensor that a checkpoint has in another order than the model keeps the model's name.
    """

    def __init__(self, pieces: Mapping[str, list[Piece]]) -> None:
        self._pieces = pieces
        """Only of tensors that are named or cut otherwise in a checkpoint, in the order of their rows."""
        self._owners = {piece.name: (name, piece) for name, found in pieces.items() for piece in found}

    @classmethod
    def of(cls, model: nn.Module) -> CheckpointNames:
        """Of a model, also one on the meta device: its architecture decides, and not the files it was read from."""
        if not isinstance(model, PreTrainedModel) or not get_model_conversion_mapping(
            model, add_legacy=False
        ):
            return cls({})
        starts: dict[str, int] = {}
        probes: dict[str, Tensor] = {}
        shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(model)}
        count = 0
        for name, shape in shapes.items():  # numbered rows: where a number comes out, the row has gone
            rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
            numbers = torch.arange(count, count + rows, device="cpu")
            # Two columns: transformers before 5.23 drops a dimension of one.
            wide = numbers.view(*shape[:-1], 1).expand(*shape[:-1], 2) if len(shape) > 1 else numbers
            probes[name] = wide.contiguous()
            starts[name] = count
            count += rows
        pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
        owners = list(starts.items())
        for name, found in saved(model, probes, wrapped=model in _WRAPPED).items():
            numbers = found.flatten(0, -2)[:, 0] if found.dim() > 1 else found
            first = int(numbers[0])
            owner, start = max((each for each in owners if each[1] <= first), key=lambda each: each[1])
            shape = shapes[owner]
            inside = torch.equal(numbers, torch.arange(first, first + len(numbers), device="cpu"))
            own = (*found.shape[:-1], shape[-1]) if len(shape) > 1 else tuple(found.shape)
            if inside:
                pieces[owner].append(Piece(name, first - start, own))
        chosen = {}
        for name, parts in pieces.items():
            parts.sort(key=lambda piece: piece.first)
            whole = sum(math.prod(piece.shape) for piece in parts) == math.prod(shapes[name])
            if whole and [piece.name for piece in parts] != [name]:
                chosen[name] = parts
        return cls(chosen)

    @classmethod
    def of_policies(cls, names: Mapping[str, CheckpointNames]) -> CheckpointNames:
        """Of several policies, by their names; see `below`."""
        return cls(
            {
                below(policy, tensor): [replace(piece, name=below(policy, piece.name)) for piece in pieces]
                for policy, found in names.items()
                for tensor, pieces in found._pieces.items()
            }
        )

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint's name, its part) of one of the model's tensors; parts are views of a contiguous one."""
        if name not in self._pieces:
            yield name, tensor
            return
        for piece in self._pieces[name]:
            yield piece.name, piece.of(tensor)

    def find(self, own: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        """(the model's tensor, its part) of a checkpoint's name. Raises KeyError."""
        if name not in self._owners:
            return own[name], own[name]
        owner, piece = self._owners[name]
        return own[owner], piece.of(own[owner])

    def layout(
        self, entries: Iterable[tuple[str, Kind, tuple[int, ...]]]
    ) -> list[tuple[str, Kind, tuple[int, ...]]]:
        """(checkpoint's name, type, shape) of (model's name, type, shape)."""
        found = []
        for name, kind, shape in entries:
            pieces = self._pieces.get(name) or [Piece(name, 0, shape)]
            found += [(piece.name, kind, piece.shape) for piece in pieces]
        return found

    def join(self, tensors: Mapping[str, Tensor], own: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Tensors by the model's names, of tensors by the checkpoint's (or by the model's: those stay as they are).

        `own` are the shapes of the model's tensors. Raises ValueError for a name or a shape that is not the model's.
        """
        left = dict(tensors)
        found: dict[str, Tensor] = {}
        for name, shape in own.items():
            pieces = self._pieces.get(name)
            if pieces is None or name in left:
                if name in left:
                    found[name] = left.pop(name)
                continue
            parts = [left.pop(piece.name, None) for piece in pieces]
            for piece, part in zip(pieces, parts, strict=True):
                if part is None:
                    raise ValueError(f"the weights are not this model's: {piece.name} is missing")
                if tuple(part.shape) != piece.shape:
                    raise ValueError(
                        f"the weights are not this model's: {piece.name} has shape {tuple(part.shape)}, not "
                        f"{piece.shape}"
                    )
            rows = [part.flatten(0, -2) if part.dim() > 1 else part for part in parts if part is not None]
            # One that has another name in files alone is shared, not copied.
            found[name] = (rows[0] if len(rows) == 1 else torch.cat(rows)).view(shape)
        return {**found, **left}


def mark_wrapped(model: nn.Module) -> None:
    """Says that the configuration beside the model's files is of a larger model, of which it is the language part.

    Others that read this configuration expect the larger one's names: `model.language_model.layers` for `model.layers`.
    """
    _WRAPPED.add(model)


def saved(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], *, wrapped: bool = False
) -> dict[str, Tensor]:
    """What `save_pretrained` would write of a new model of this architecture; `wrapped`: of the larger one's part."""
    untyped: Any = model
    read_with = untyped.__dict__.pop("_weight_conversions", None)
    if wrapped:
        untyped._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    try:
        found: dict[str, Tensor] = revert_weight_conversion(untyped, dict(tensors))
    finally:
        untyped.__dict__.pop("_weight_conversions", None)
        if read_with is not None:
            untyped._weight_conversions = read_with
    if untyped.config.model_type == "kimi_linear":
        return {_KIMI_DENSE.sub(r".mlp.\1", name): value for name, value in found.items()}
    return found


_KIMI_DENSE = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj\.)")
"""transformers renames layers of experts alone as it reads, and dense ones too as it writes."""
_WRAPPED: WeakSet[nn.Module] = WeakSet()


_NAMES: WeakKeyDictionary[nn.Module, CheckpointNames] = WeakKeyDictionary()


def _names_of(model: nn.Module) -> CheckpointNames:
    if model not in _NAMES:
        _NAMES[model] = CheckpointNames.of(model)
    return _NAMES[model]


def weight_layout(model: nn.Module, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(checkpoint's name, type, shape) in canonical order. Parameters travel in `dtype`, buffers in their own type."""
    own = [(name, _travel_type(tensor, dtype), tuple(tensor.shape)) for name, tensor in state_tensors(model)]
    return _names_of(model).layout(own)


def copy_out(model: nn.Module, name: str, out: memoryview, dtype: torch.dtype) -> None:
    """Writes one tensor of the layout into `out`, cast as the layout says. Raises KeyError on other names."""
    whole, tensor = _names_of(model).find(_named(model), name)
    travel = _travel_type(whole, dtype)
    if tensor.numel():
        flat = torch.frombuffer(out, dtype=travel, count=tensor.numel())
        flat.view(tensor.shape).copy_(tensor.detach())


def published_tensor(model: nn.Module, name: str) -> Tensor:
    """The model's own memory of one tensor of the layout. Raises KeyError on other names."""
    return _names_of(model).find(_named(model), name)[1].detach()


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], upload: Callable[[Tensor], Tensor] = lambda own: own
) -> None:
    """Copies a whole version into the model, cast to the model's types; by the checkpoint's names or the model's.

    `upload` takes each to the model's device.

    Raises ValueError, before anything is written, when names or shapes are not the model's own.
    """
    own = _named(model)
    tensors = _joined(model, own, tensors)
    if problem := _difference(_shapes(own), _shapes(tensors)):
        raise ValueError(f"the weights are not this model's: {problem}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(upload(tensors[name]))


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

    They may be read-only; the model keeps what they are views of. Odd addresses, other types and experts that come one
    by one are copied.
    """
    own = _named(model)
    tensors = _joined(model, own, tensors)
    if problem := _difference(_shapes(own), _shapes(tensors)):
        raise ValueError(f"the weights are not this model's: {problem}")
    for name, tensor in own.items():
        given = tensors[name]
        fits = given.dtype == tensor.dtype and given.device == tensor.device
        aligned = given.data_ptr() % ALIGNMENT_BYTES == 0 and given.is_contiguous()
        tensor.data = given if fits and aligned else given.to(tensor, copy=True)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(state_tensors(model))


def _joined(
    model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    if own.keys() == tensors.keys():
        return tensors
    return _names_of(model).join(tensors, _shapes(own))


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
