"""Whole weights at the rank that publishes them, in the type that they are computed in: each part goes there once, from
the nearest rank that has it. Knows no optimizer: the values of a model are its masters, rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from headrace_modelkit.tensor_files import Box
from headrace_trainer.backends._base import Owners
from headrace_trainer.backends.fsdp.loading import HostCopies
from headrace_trainer.group.group import TrainerGroup
from torch import Tensor

from headrace_megatron.architecture import Architecture
from headrace_megatron.groups import Groups
from headrace_megatron.names import Part, parts_of

Coordinate = tuple[int, int, int]
"""Tensor-parallel rank, stage, and expert-parallel rank."""


class Publication:
    """Who has which part of which weight. All ranks make it, and call `wholes` in one order of names."""

    def __init__(self, architecture: Architecture, ranks: TrainerGroup, groups: Groups) -> None:
        self._architecture, self._ranks, self._groups = architecture, ranks, groups
        self._copies = HostCopies(ranks.device)

    def wholes(self, values: Mapping[str, Tensor], owners: Owners | None) -> Iterator[tuple[str, Tensor]]:
        """Each weight, of the local parameters' values, on the host of its owner, by default the leader; every rank
        exhausts it. One holds until the next is asked for.
        """
        names = self._architecture.shapes if owners is None else owners
        found = self._at_owners(values, {name: owners[name] if owners else 0 for name in names})
        return self._copies.of(found) if self._ranks.device.type == "cuda" else found

    def _at_owners(self, values: Mapping[str, Tensor], owners: Owners) -> Iterator[tuple[str, Tensor]]:
        rank, device = self._ranks.rank, self._ranks.device
        kind = next(iter(values.values())).dtype
        for name, owner in owners.items():
            whole = (
                torch.empty(self._architecture.shapes[name], dtype=kind, device=device)
                if rank == owner
                else None
            )
            operations, taken = [], list[tuple[Tensor, Tensor]]()
            for sender, part in self._senders(name, owner):
                place = part.of_whole(whole) if whole is not None else None
                if rank == sender:
                    own = part.of_local(values[part.local])
                    if place is not None:
                        place.copy_(own)
                    else:
                        operations.append(dist.P2POp(dist.isend, own.contiguous(), owner))
                elif place is not None:
                    room = torch.empty(place.shape, dtype=kind, device=device)
                    operations.append(dist.P2POp(dist.irecv, room, sender))
                    taken.append((place, room))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for place, room in taken:
                place.copy_(room)
            if whole is not None:
                yield name, whole

    def _senders(self, name: str, owner: int) -> Iterator[tuple[int, Part]]:
        """The rank that sends each part: the owner itself, or the nearest one that has it."""
        for holders in self._holders[name]:
            sender = min(holders, key=lambda rank: (abs(rank - owner), rank))
            yield sender, holders[sender]

    @cached_property
    def _holders(self) -> dict[str, list[dict[int, Part]]]:
        """Of each weight its parts: the ranks that have one, and how it lies there."""
        groups = self._groups
        own = (groups.tensor.rank(), groups.stage, groups.expert.rank())
        told = [json.loads(each) for each in self._ranks.gather(json.dumps(own).encode())]
        if self._ranks.world_size > 1:  # NCCL wants all ranks in a group's first exchange.
            dist.all_reduce(torch.zeros(1, device=self._ranks.device))
        by_place: dict[Coordinate, list[int]] = {}
        for rank, place in enumerate(told):
            by_place.setdefault(tuple(place), []).append(rank)
        found: dict[str, dict[tuple[Box, ...], dict[int, Part]]] = {
            name: {} for name in self._architecture.shapes
        }
        for (tensor, stage, expert), ranks in by_place.items():
            parts = parts_of(self._architecture, groups.layout, tensor, stage, expert)
            for name, part in parts.items():
                boxes = tuple(box for box, _ in part.boxes(self._architecture.shapes[name]))
                found[name].setdefault(boxes, {}).update(dict.fromkeys(ranks, part))
        return {name: list(parts.values()) for name, parts in found.items()}
