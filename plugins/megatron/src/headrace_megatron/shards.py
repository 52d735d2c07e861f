"""The parameters of one rank in flat memory: values, an fp32 gradient, and a slice of fp32 master weights.

The ranks that have the same parameters (replicas) divide masters and optimizer state among them, each one slice of the
flat memory. Knows no canonical names and no loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in flat memory."""

    start: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)


class Shards:
    """Takes over parameters. `group` are the ranks that have the same ones; frozen ones do not learn."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: ProcessGroup,
        device: torch.device,
        *,
        frozen: bool,
    ) -> None:
        self.group = self._group = group
        self._parameters = dict(parameters)
        self._places = dict(_lay_out(self._parameters))
        self._frozen = frozen
        used = max(place.end for place in self._places.values())
        self._length = -(-used // group.size())
        size = self._length * group.size()
        dtype = next(iter(self._parameters.values())).dtype
        self._values = torch.zeros(size, dtype=dtype, device=device)
        accumulated = 0 if frozen else size
        self._gradients = torch.zeros(accumulated, dtype=torch.float32, device=device)
        self._reduced = torch.zeros(accumulated // group.size(), dtype=torch.float32, device=device)
        # A model in fp32 computes with its masters themselves.
        apart = not frozen and dtype is not torch.float32
        self._own_masters = torch.zeros(self._length, dtype=torch.float32, device=device) if apart else None
        self._bind()

    def masters(self) -> dict[str, Tensor]:
        """This rank's fp32 masters, flat, by parameter; after writing to them call `spread`."""
        return self._pieces(self._values_slice() if self._own_masters is None else self._own_masters)

    def values(self) -> dict[str, Tensor]:
        """Each parameter, whole and in the type that it is computed in."""
        return {
            name: self._values[place.start : place.end].view(place.shape)
            for name, place in self._places.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """As `masters`, of the gradient that `reduce` has added up."""
        return self._pieces(self._reduced)

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each parameter."""
        return {name: place.shape for name, place in self._places.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all that it keeps."""
        kept = (self._values, self._gradients, self._reduced, self._own_masters)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def fill(self, name: str, value: Tensor) -> None:
        """Sets a whole parameter, and this rank's piece of its master."""
        place = self._places[name]
        self._values[place.start : place.end].copy_(value.flatten())
        if self._own_masters is not None:
            self.masters()[name].copy_(self.piece(name, value))

    def piece(self, name: str, value: Tensor) -> Tensor:
        """This rank's piece of a tensor that is shaped like a parameter."""
        first, last = self._bounds(name)
        return value.flatten()[first:last]

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """A tensor shaped like a parameter, 0 but for this rank's piece of it."""
        first, last = self._bounds(name)
        found = piece.new_zeros(math.prod(self._places[name].shape))
        found[first:last] = piece
        return found.view(self._places[name].shape)

    def gradient_of(self, name: str) -> Tensor:
        """What this rank has accumulated of a parameter since the last `reduce`; writing to it changes that."""
        place = self._places[name]
        return self._gradients[place.start : place.end]

    def reduce(self) -> None:
        """Adds what the ranks of the group have accumulated to their pieces; the accumulators are empty then."""
        if self._group.size() == 1:
            self._reduced += self._gradients
        else:
            found = torch.empty_like(self._reduced)
            dist.reduce_scatter_tensor(found, self._gradients, group=self._group)
            self._reduced += found
        self._gradients.zero_()

    def drop_gradients(self) -> None:
        """Drops everything that was accumulated."""
        self._gradients.zero_()
        self._reduced.zero_()

    def spread(self) -> None:
        """Makes the values of all ranks those of the masters."""
        own = self._values_slice()
        if self._own_masters is not None:
            own.copy_(self._own_masters)
        if self._group.size() > 1:
            dist.all_gather_into_tensor(self._values, own.clone(), group=self._group)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes everything elsewhere; nothing runs until it is back on the device."""
        self._values, self._gradients, self._reduced = map(
            move, (self._values, self._gradients, self._reduced)
        )
        if self._own_masters is not None:
            self._own_masters = move(self._own_masters)
        self._bind()

    def _bind(self) -> None:
        """Lets the module's parameters, and their gradients, be views of the flat memory."""
        for name, parameter in self._parameters.items():
            place = self._places[name]
            parameter.grad = None
            parameter.data = self._values[place.start : place.end].view(place.shape)
            parameter.requires_grad_(not self._frozen)
            if not self._frozen:
                parameter.grad_dtype = torch.float32
                parameter.grad = self._gradients[place.start : place.end].view(place.shape)

    def _values_slice(self) -> Tensor:
        start = self._group.rank() * self._length
        return self._values[start : start + self._length]

    def _bounds(self, name: str) -> tuple[int, int]:
        """Begin and end of this rank's piece in the flat parameter."""
        place, start = self._places[name], self._group.rank() * self._length
        first, last = (min(max(each, place.start), place.end) for each in (start, start + self._length))
        return first - place.start, last - place.start

    def _pieces(self, own: Tensor) -> dict[str, Tensor]:
        start = self._group.rank() * self._length
        found = {}
        for name, place in self._places.items():
            first, last = self._bounds(name)
            begin = place.start + first - start if last > first else 0
            found[name] = own[begin : begin + last - first]
        return found


class ModelShards:
    """The parameters of a module in as many `Shards` as there are groups of ranks that have the same ones: the experts'
    apart, where they are divided. See there for the methods.
    """

    def __init__(
        self,
        module: nn.Module,
        group_of: Callable[[str], ProcessGroup],
        device: torch.device,
        *,
        frozen: bool,
    ) -> None:
        by_group: dict[ProcessGroup, dict[str, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            by_group.setdefault(group_of(name), {})[name] = parameter
        self._all = [Shards(own, group, device, frozen=frozen) for group, own in by_group.items()]
        self._order = [name for name, _ in module.named_parameters()]
        self._owners = {name: shards for shards in self._all for name in shards.shapes()}

    def group_of(self, name: str) -> ProcessGroup:
        """The ranks that have the same parameter."""
        return self._owners[name].group

    def masters(self) -> dict[str, Tensor]:
        """See `Shards`; so are the others."""
        return self._in_order([shards.masters() for shards in self._all])

    def values(self) -> dict[str, Tensor]:
        return self._in_order([shards.values() for shards in self._all])

    def gradients(self) -> dict[str, Tensor]:
        return self._in_order([shards.gradients() for shards in self._all])

    def shapes(self) -> dict[str, torch.Size]:
        return self._in_order([shards.shapes() for shards in self._all])

    @property
    def size_bytes(self) -> int:
        return sum(shards.size_bytes for shards in self._all)

    def fill(self, name: str, value: Tensor) -> None:
        self._owners[name].fill(name, value)

    def piece(self, name: str, value: Tensor) -> Tensor:
        return self._owners[name].piece(name, value)

    def whole(self, name: str, piece: Tensor) -> Tensor:
        return self._owners[name].whole(name, piece)

    def gradient_of(self, name: str) -> Tensor:
        return self._owners[name].gradient_of(name)

    def reduce(self) -> None:
        for shards in self._all:
            shards.reduce()

    def drop_gradients(self) -> None:
        for shards in self._all:
            shards.drop_gradients()

    def spread(self) -> None:
        for shards in self._all:
            shards.spread()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        for shards in self._all:
            shards.move(move)

    def _in_order(self, parts: list[dict[str, Value]]) -> dict[str, Value]:
        found = {name: value for part in parts for name, value in part.items()}
        return {name: found[name] for name in self._order}


def _lay_out(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, _Place]]:
    start = 0
    for name, parameter in parameters.items():
        yield name, _Place(start, parameter.shape)
        start += parameter.numel()
