"""The backends of a run's policies on one rank: in most runs one, whose tensors keep their names.

They are loaded, saved, published, held and released together, so that a version of the run is one of all of them.
Tensors of all but the run's own policy stand below its name: `guesser/model.norm.weight`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
from headrace_modelkit.tensor_files import whole
from headrace_modelkit.weights import below
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.weights.versions import StoredWeights
from torch import Tensor

from headrace_trainer.backends._base import AdaptingBackend, Backend, Owners, ReferenceFacts, StatePart
from headrace_trainer.checkpoints.reader import STEPS_KIND, StateReader
from headrace_trainer.memory import MemoryPlan, Rooms

Gathered = Literal["merged", "all", "judge", "base", "adapters"]
"""Weights with what they have of adapters, behind these (all) the adapters once more, and behind these (judge) the
critic's head; frozen weights; adapters."""


class Backends(dict[str, Backend]):
    """By the policies' names; "" is the run's own, which comes first."""

    def reader(self, policy: str, reader: StateReader) -> StateReader:
        """What a checkpoint holds of one of them."""
        return reader if len(self) == 1 else reader.of_policy(policy)

    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        """What all need: each is laid out in the room that those before it leave. Raises ModelNotReadable."""
        left, plans = rooms, list[MemoryPlan]()
        for backend in self.values():
            plans.append(backend.memory_plan(left))
            host = replace(left.host, free=left.host.free - sum(plans[-1].host.values()))
            device = left.device and replace(
                left.device, free=left.device.free - sum(plans[-1].device.values())
            )
            left = Rooms(host, device)
        return replace(
            plans[0],
            host=dict(sum((Counter(plan.host) for plan in plans), Counter())),
            device=dict(sum((Counter(plan.device) for plan in plans), Counter())),
            saves_in_place=any(plan.saves_in_place for plan in plans),
            lends=all(plan.lends for plan in plans),
        )

    @property
    def layout_chosen(self) -> str:
        """Of each policy, where there is a choice."""
        if len(self) == 1:
            return self[""].layout_chosen
        named = {name or "policy": backend.layout_chosen for name, backend in self.items()}
        return "; ".join(f"{name}: {layout}" for name, layout in named.items() if layout)

    @property
    def notes(self) -> tuple[str, ...]:
        """Of each policy."""
        named = {f"{name}: " if name else "": backend.notes for name, backend in self.items()}
        return tuple(f"{which}{note}" for which, notes in named.items() for note in notes)

    @property
    def reference(self) -> ReferenceFacts | None:
        """All references, as one."""
        return _joined(backend.reference for backend in self.values())

    @property
    def base_model(self) -> ReferenceFacts | None:
        """All frozen weights beside which adapters learn, as one; None where all weights do. Asked on the leader."""
        return _joined(
            backend.base_model for backend in self.values() if isinstance(backend, AdaptingBackend)
        )

    @property
    def base(self) -> StoredWeights | None:
        """Of the run's own policy, as `AdaptingBackend.base`: all policies' are one where adapters are published."""
        own = self[""]
        return own.base if isinstance(own, AdaptingBackend) else None

    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """As `Backend.weight_layout`."""
        return [
            (below(name, tensor), kind, shape)
            for name, backend in self.items()
            for tensor, kind, shape in backend.weight_layout()
        ]

    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """As `Backend.weights`."""
        for name, backend in self.items():
            own = None
            if owners is not None:
                of_policy = {below(name, tensor): tensor for tensor, _, _ in backend.weight_layout()}
                own = {of_policy[full]: rank for full, rank in owners.items() if full in of_policy}
            for tensor, value in backend.weights(published=published, owners=own):
                yield below(name, tensor), value

    def gathered(self, what: Gathered, *, published: bool) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on the leader; the other ranks take part. Of bases the run's own: all policies' are one."""
        for name, backend in self.items():
            adapting = backend if isinstance(backend, AdaptingBackend) else None
            found: list[Iterator[tuple[str, Tensor]]] = []
            if what == "base" and adapting is not None and not name:
                found = [adapting.base_weights(published=published)]
            elif what in ("merged", "all", "judge"):
                found = [backend.weights(published=published)]
            if what in ("all", "judge", "adapters") and adapting is not None:
                found.append(adapting.adapters())
            if what == "judge":
                found.append(backend.head())
            for tensor, value in chain.from_iterable(found):
                yield below(name, tensor), value

    def adapter_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Of a version of adapters alone; empty where the run's versions are whole."""
        return [
            (below(name, tensor), kind, shape)
            for name, backend in self.items()
            if isinstance(backend, AdaptingBackend)
            for tensor, kind, shape in backend.adapter_layout()
        ]

    def weight_parts(self) -> Iterator[StatePart]:
        """As `Backend.weight_parts`."""
        for name, backend in self.items():
            for each in backend.weight_parts():
                yield replace(each, name=below(name, each.name))

    def moment_parts(self, *, leads: bool) -> Iterator[StatePart]:
        """As `Backend.moment_parts`, and of all but the own policy how many optimizer steps it has made."""
        for name, backend in self.items():
            for each in backend.moment_parts():
                kind, _, tensor = each.name.partition("/")
                yield replace(each, name=f"{kind}/{below(name, tensor)}")
            if name and leads:
                steps = torch.tensor([backend.optimizer_steps])
                yield StatePart(f"{STEPS_KIND}/{below(name, STEPS_KIND)}", (1,), whole((1,)), steps)


def _joined(facts: Iterable[ReferenceFacts | None]) -> ReferenceFacts | None:
    """Of all that there are, as one."""
    found = [each for each in facts if each is not None]
    if len(found) < 2:
        return found[0] if found else None
    digest = digest_bytes("".join(each.digest for each in found).encode())
    return ReferenceFacts(", ".join(each.name for each in found), digest)
