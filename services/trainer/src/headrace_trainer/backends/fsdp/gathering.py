"""The tensors of a sharded model by name: the parts that this rank has, and wholes, one at a time.

Knows no loss, no optimizer and no forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from headrace_modelkit.critic import Critic
from headrace_modelkit.lora import (
    A,
    B,
    adapted_layers,
    adapter_of,
    is_adapter,
    merged_weight,
    quantized_weights,
)
from headrace_modelkit.tensor_files import Box, slices, whole
from headrace_modelkit.weights import state_tensors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from headrace_trainer.backends._base import Owners
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.loading import HostCopies, box_of, local
from headrace_trainer.backends.shared.distributing import Place
from headrace_trainer.backends.shared.fit import CRITIC
from headrace_trainer.group.group import TrainerGroup


class Root(nn.Module):
    """The module that is sharded as one: a model, maybe with a critic, whose layers are gathered one at a time.

    Its forward takes what there is to compute and an anchor, and gives a tuple of tensors. Of nothing (None) it gives
    the anchor alone: a backward through it runs no layer, and only lets fully_shard finish what earlier ones have
    accumulated.
    """

    model: Any
    critic: Critic | None


class NamedTensors:
    """Those of a policy and of its critic, if it has one. The critic's are named "critic." and no part of `weights`;
    nor are adapters, which `weights` has merged. A subclass shards them, and calls `_name_tensors` when they move.
    """

    def __init__(self, policy: Root, ranks: TrainerGroup, experts: ExpertMesh | None) -> None:
        self.policy, self.model = policy, policy.model
        self._ranks, self._experts = ranks, experts
        self._copies = HostCopies(ranks.device)
        self._divided = set[str]()
        """Names of the experts' weights, of which this rank has a share only."""

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer by name, the critic's too: sharded ones as DTensors."""
        return self.parameters | self.buffers

    def box(self, name: str) -> Box:
        """Which part of a whole parameter or buffer is here."""
        if name in self.quantized:
            return whole(self.quantized[name].shape)
        found = box_of(self.buffers[name] if name in self.buffers else self.parameters[name])
        if self._experts is None or name not in self._divided:
            return found
        (first, end), *others = found
        before = self._experts.place * self.parameters[name].shape[0]
        return (before + first, before + end), *others

    def places(self, names: Iterable[str], types: Mapping[str, torch.dtype] | None = None) -> list[Place]:
        """Where this rank's parts of these tensors go; they travel in `types`, by default in their own."""
        tensors = self.tensors()
        return [
            Place(
                name,
                self.box(name),
                types[name] if types else tensors[name].dtype,
                self.quantized[name].take if name in self.quantized else local(tensors[name]).copy_,
            )
            for name in names
        ]

    def fill_from(self, found: Iterator[tuple[str, Tensor]]) -> None:
        """Takes this rank's parts of whole tensors, which every rank has one after another."""
        tensors = self.tensors()
        with torch.no_grad():
            for name, value in found:
                local(tensors[name]).copy_(value[slices(self.box(name))])

    def shards(self) -> dict[str, Tensor]:
        """This rank's own fp32 master shards of what learns; writing to them changes the model."""
        return {name: p.to_local().detach() for name, p in self.learned.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's part of all weights and buffers."""
        shards = (parameter.to_local() for parameter in self.parameters.values())
        coded = (own for each in self.quantized.values() for own in each.buffers())
        return sum(tensor.nbytes for tensor in (*shards, *self.buffers.values(), *coded))

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the reduced gradient; zeros where nothing was accumulated."""
        found = {}
        for name, parameter in self.learned.items():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else None
            found[name] = torch.zeros_like(parameter.to_local()) if local is None else local
        return found

    def drop_gradients(self) -> None:
        """Drops reduced gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _name_tensors(self) -> None:
        tensors = dict(state_tensors(self.model))
        critic = self.policy.critic
        beside = {f"{CRITIC}{name}": value for name, value in (critic.tensors() if critic else ())}
        self.quantized = quantized_weights(self.model)
        """Of the buffers those that have codes in their place."""
        names = [name for name in tensors if not is_adapter(name)]
        if (
            self.quantized
        ):  # As if they were parameters, which come first: files are written in the model's order.
            place = {name: at for at, name in enumerate(self.model.state_dict(keep_vars=True))}
            kept = {name for name, _ in self.model.named_buffers()} - self.quantized.keys()
            names.sort(key=lambda name: (name in kept, place[name]))
        self.weight_names = names
        self.adapter_names = [name for name in tensors if is_adapter(name)]
        self.critic_names = list(beside)
        both = tensors | beside
        self.parameters = {name: value for name, value in both.items() if isinstance(value, DTensor)}
        self.learned = {name: value for name, value in self.parameters.items() if value.requires_grad}
        self.buffers = {name: value for name, value in both.items() if not isinstance(value, DTensor)}
        """Buffers, and frozen weights that are not sharded."""
        self._scales = {name: layer.scale for name, layer in adapted_layers(self.model)}

    def gather(self, name: str, shard: Tensor | None = None) -> Tensor:
        """The whole of a parameter, or of a tensor sharded like it, on the CPU; all ranks call it."""
        return self._whole(name, shard).cpu()

    def weights(
        self, dtype: torch.dtype | None = None, *, merged: bool = True, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the policy, whole, on the leader's CPU, with or without adapters merged; all
        ranks exhaust it.

        Others keep theirs where it is computed: one way for all to the host is shared by the ranks of a host. With
        `dtype`, parameters that travel between ranks or from a device are cast to it before; what comes from a device
        holds until the next one is asked for then. With `owners` each comes to its owner's CPU alone.
        """
        if owners is not None:
            found = self._owned(dtype, owners, merged=merged)
        else:
            found = self._wholes(dtype, merged=merged)
            if not self._ranks.leads:
                return found
        if dtype is not None and self._ranks.device.type == "cuda":
            return self._copies.of(found)
        return ((name, whole.cpu()) for name, whole in found)

    def _wholes(self, dtype: torch.dtype | None, *, merged: bool) -> Iterator[tuple[str, Tensor]]:
        travels = self._ranks.world_size > 1 or self._ranks.device.type != "cpu"
        for name in self.weight_names:
            if merged and self.is_adapted(name):
                yield name, self.weight(name)  # made of fp32 wholes, to the same bits on every layout
            else:
                yield name, self._whole(name, dtype=dtype if travels and name in self.parameters else None)

    def _owned(
        self, dtype: torch.dtype | None, owners: Owners, *, merged: bool
    ) -> Iterator[tuple[str, Tensor]]:
        for name, owner in owners.items():
            if merged and self.is_adapted(name):
                whole: Tensor | None = self.weight(name)
            else:
                whole = self._at(name, owner, dtype if name in self.parameters else None)
            if whole is not None and owner == self._ranks.rank:
                yield name, whole

    def _at(self, name: str, owner: int, dtype: torch.dtype | None) -> Tensor | None:
        """As `_whole`, at one rank, which alone is sent the others' rows where all have as many."""
        parameter = self.parameters.get(name)
        if parameter is None or (self._experts and name in self._divided):
            return self._whole(name, dtype=dtype)
        mesh, shape = parameter.device_mesh, tuple(parameter.shape)
        shards = mesh.size(mesh.ndim - 1)
        if parameter.placements[-1] != Shard(0) or shards == 1:
            return self._whole(name, dtype=dtype)
        if owner // shards != self._ranks.rank // shards:
            return None  # The ranks of another copy.
        local = parameter.to_local().detach()
        local = local if dtype is None else local.to(dtype)
        return self._rows_at(owner % shards, local, shape, mesh.get_group(mesh.ndim - 1))

    def _rows_at(
        self, owner: int, shard: Tensor, shape: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor | None:
        """The whole of shards of rows, where it is computed with, at one rank of their group; None at the others."""
        ranks, rows = group.size(), -(-shape[0] // group.size())
        own = shard.new_zeros(rows, *shape[1:], device=self._ranks.device)  # The last ranks may have fewer.
        own[: len(shard)] = shard
        sent = own.view(-1).view(torch.uint8)
        whole = sent.new_empty(ranks * len(sent)) if owner == group.rank() else None
        places = list(torch.split(whole, len(sent))) if whole is not None else None
        dist.gather(sent, places, group=group, group_dst=owner)
        return None if whole is None else whole.view(own.dtype).view(ranks * rows, *shape[1:])[: shape[0]]

    def through_wholes(
        self, found: Iterable[tuple[str, Tensor]], compute: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, shard) of what `compute` makes of whole matrices, of whose rows these are the ranks' shards. Each rank
        of a copy computes one of as many at a time; all ranks exhaust it, with the same names.
        """
        mesh = next(iter(self.learned.values())).device_mesh
        group = mesh.get_group(mesh.ndim - 1)
        ranks, own, rest = group.size(), group.rank(), iter(found)
        while several := list(islice(rest, ranks)):
            shapes = [tuple(self.learned[name].shape) for name, _ in several]
            for owner, (_, shard) in enumerate(several):
                whole = self._rows_at(owner, shard, shapes[owner], group)
                if whole is not None:
                    made = compute(whole)
            for owner, (name, shard) in enumerate(several):
                rows, width = -(-shapes[owner][0] // ranks), shapes[owner][1]
                received = torch.empty(rows, width, dtype=shard.dtype, device=self._ranks.device)
                parts = None
                if owner == own:
                    padded = nn.functional.pad(made, (0, 0, 0, ranks * rows - len(made)))
                    parts = [part.view(torch.uint8) for part in torch.split(padded.contiguous(), rows)]
                dist.scatter(received.view(torch.uint8), parts, group=group, group_src=owner)
                yield name, received[: len(shard)]

    def weight(self, name: str) -> Tensor:
        """One of them, where it is computed with; all ranks call it."""
        tensor = self._whole(name)
        if self.is_adapted(name):
            layer = adapter_of(name)
            adapter = self._whole(f"{layer}.{A}"), self._whole(f"{layer}.{B}")
            tensor = merged_weight(tensor, *adapter, self._scales[layer])
        return tensor

    def is_adapted(self, name: str) -> bool:
        """Whether a weight has an adapter, which is merged into what is published and saved of it."""
        return adapter_of(name) in self._scales

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Every part of an adapter, whole; all ranks exhaust it."""
        return ((name, self.gather(name)) for name in self.adapter_names)

    def computed_here(self, name: str, whole: Tensor) -> Tensor:
        """What a forward on this rank takes of a whole tensor: all of it, or of divided experts' its own."""
        return self._experts.own(whole) if self._experts and name in self._divided else whole

    def _whole(self, name: str, shard: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """As `gather`, where it is computed with; of a parameter's shards, cast to `dtype` before they travel."""
        if name in self.quantized:
            return self.quantized[name].whole()
        if name in self.buffers:
            return self.buffers[name].detach()
        parameter = self.parameters[name]
        local = parameter.to_local().detach() if shard is None else shard
        local = local if dtype is None else local.to(dtype)
        local = local.to(self._ranks.device)  # what lies on the host travels over the device's network
        if self._ranks.world_size == 1:
            return local
        own: Tensor = _with_local(parameter, local).full_tensor()
        return self._experts.whole(own) if self._experts and name in self._divided else own

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole parameter or buffer."""
        if name in self.quantized:
            return self.quantized[name].shape
        if name in self.buffers:
            return tuple(self.buffers[name].shape)
        parameter = self.parameters[name]
        if self._experts is not None and name in self._divided:
            return self._experts.shape(parameter)
        return tuple(parameter.shape)

    def scatter(self, name: str, whole: Tensor | None) -> Tensor:
        """This rank's shard of a tensor that rank 0 holds whole, sharded like parameter `name`."""
        parameter = self.parameters[name]
        device = self._ranks.device
        if whole is None:
            value = torch.empty(self.shape(name), dtype=torch.float32, device=device)
        else:
            value = whole.float().contiguous().to(device)
        self._ranks.share(value)
        if self._experts is not None and name in self._divided:
            value = self._experts.own(value)
        sharded = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return sharded.to_local().clone()


def _with_local(like: DTensor, local: Tensor) -> DTensor:
    """A tensor sharded like another, with another shard."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
