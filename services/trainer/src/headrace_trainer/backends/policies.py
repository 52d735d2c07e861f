"""Several policies that learn in the same conversations: each has a backend of its own, on the same ranks.

They are loaded, saved, published, held and released together, so that a version of the run is one of all of them.
Tensors of all but the run's own policy stand below its name: `guesser/model.norm.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TypeVar

import torch
from headrace_modelkit.tensor_files import Box, whole
from headrace_modelkit.weights import below, own_name
from headrace_servicekit.rpc.digests import digest_bytes
from torch import Tensor
from typing_extensions import override

from headrace_trainer.backends._base import (
    AdaptingBackend,
    Backend,
    CommitReport,
    MicroReport,
    Owners,
    ReferenceFacts,
    StatePart,
    StateReader,
    WarmUp,
)
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Columns, Rows
from headrace_trainer.memory import MemoryPlan, Rooms

STEPS_KIND = "steps"
"""Kind of the entries that say how many optimizer steps a policy has made."""
Value = TypeVar("Value")


class PoliciesBackend(Backend):
    """`parts` are the backends, by the names in `policies`, of which the first is "", the run's own.

    What computes is asked of a part; asked of all, it is the run's own policy that does it.
    """

    def __init__(self, parts: Mapping[str, Backend], *, leads: bool) -> None:
        self.parts = list(parts.values())
        self.by_name, self._own, self._leads = dict(parts), self.parts[0], leads

    # All of them

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        """What all need: each is laid out in the room that those before it leave."""
        left, plans = rooms, list[MemoryPlan]()
        for part in self.parts:
            plans.append(part.memory_plan(left))
            host = replace(left.host, free=left.host.free - sum(plans[-1].host.values()))
            device = left.device and replace(
                left.device, free=left.device.free - sum(plans[-1].device.values())
            )
            left = Rooms(host, device)
        needed = [_summed([getattr(plan, where) for plan in plans]) for where in ("host", "device")]
        return replace(
            plans[0],
            host=needed[0],
            device=needed[1],
            saves_in_place=any(plan.saves_in_place for plan in plans),
            lends=all(plan.lends for plan in plans),
        )

    @property
    @override
    def layout_chosen(self) -> str:  # type: ignore[override]
        """Of each policy, where there is a choice."""
        named = {name or "policy": part.layout_chosen for name, part in self.by_name.items()}
        return "; ".join(f"{name}: {layout}" for name, layout in named.items() if layout)

    @property
    @override
    def notes(self) -> list[str]:  # type: ignore[override]
        """Of each policy."""
        named = {f"{name}: " if name else "": part.notes for name, part in self.by_name.items()}
        return [f"{which}{note}" for which, notes in named.items() for note in notes]

    @property
    @override
    def check_seconds(self) -> float:  # type: ignore[override]
        """Of all."""
        return sum(part.check_seconds for part in self.parts)

    @property
    @override
    def saves_in_place(self) -> bool:  # type: ignore[override]
        """Whether the host has no room for a copy of one of them."""
        return any(part.saves_in_place for part in self.parts)

    @override
    def check_files(self, *, initial: bool) -> None:
        for part in self.parts:
            part.check_files(initial=initial)

    @override
    def load_initial(self) -> None:
        for part in self.parts:
            part.load_initial()

    @override
    def check_state(self, reader: StateReader) -> None:
        for name, part in self.by_name.items():
            part.check_state(PolicyReader(reader, name))

    @override
    def load_state(self, reader: StateReader | None) -> None:
        for name, part in self.by_name.items():
            part.load_state(PolicyReader(reader, name) if reader is not None else None)

    @override
    def load_reference(self) -> None:
        for part in self.parts:
            part.load_reference()

    @property
    @override
    def reference(self) -> ReferenceFacts | None:
        return _joined([part.reference for part in self.parts])

    @property
    @override
    def reference_bytes(self) -> int:
        return sum(part.reference_bytes for part in self.parts if part.reference is not None)

    @override
    def warm_up(self) -> WarmUp:
        return self._own.warm_up()

    @override
    def zero(self) -> None:
        for part in self.parts:
            part.zero()

    @override
    def hold(self) -> None:
        for part in self.parts:
            part.hold()

    @override
    def end_hold(self, *, back: bool) -> None:
        for part in self.parts:
            part.end_hold(back=back)

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (below(name, tensor), kind, shape)
            for name, part in self.by_name.items()
            for tensor, kind, shape in part.weight_layout()
        ]

    @override
    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, part in self.by_name.items():
            own = None
            if owners is not None:
                of_part = {below(name, tensor): tensor for tensor, _, _ in part.weight_layout()}
                own = {of_part[whole]: rank for whole, rank in owners.items() if whole in of_part}
            for tensor, value in part.weights(published=published, owners=own):
                yield below(name, tensor), value

    @override
    def weight_parts(self) -> Iterator[StatePart]:
        for name, part in self.by_name.items():
            for each in part.weight_parts():
                yield replace(each, name=below(name, each.name))

    @override
    def moment_parts(self) -> Iterator[StatePart]:
        for name, part in self.by_name.items():
            for each in part.moment_parts():
                kind, _, tensor = each.name.partition("/")
                yield replace(each, name=f"{kind}/{below(name, tensor)}")
            if name and self._leads:
                steps = torch.tensor([part.optimizer_steps])
                yield StatePart(f"{STEPS_KIND}/{below(name, STEPS_KIND)}", (1,), whole((1,)), steps)

    @property
    @override
    def optimizer_steps(self) -> int:
        return self._own.optimizer_steps

    @override
    def suspend(self) -> int:
        return sum(part.suspend() for part in self.parts)

    @override
    def wake(self) -> None:
        for part in self.parts:
            part.wake()

    @override
    def release(self) -> None:
        for part in self.parts:
            part.release()

    @property
    def base_model(self) -> ReferenceFacts | None:
        """The frozen weights beside which adapters learn."""
        return _joined([part.base_model for part in self.parts if isinstance(part, AdaptingBackend)])

    # The run's own

    @property
    @override
    def replicas(self) -> int:
        return self._own.replicas

    @property
    @override
    def replica(self) -> int:
        return self._own.replica

    @property
    @override
    def shares_prefixes(self) -> bool:
        return self._own.shares_prefixes

    @property
    @override
    def costs(self) -> Costs:
        return self._own.costs

    @override
    def micro(self, rows: Rows) -> MicroReport:
        return self._own.micro(rows)

    @override
    def gradient_is_finite(self) -> bool:
        return self._own.gradient_is_finite()

    @override
    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        return self._own.infer(rows, columns)

    @override
    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        return self._own.commit(denominator, learning_rate, critic_rate)


class PolicyReader(StateReader):
    """What a checkpoint of several policies holds of one; "" is the run's own."""

    def __init__(self, reader: StateReader, policy: str) -> None:
        self._reader, self._policy = reader, policy

    @override
    def weight(self, name: str, box: Box | None = None) -> Tensor:
        return self._reader.weight(below(self._policy, name), box)

    @override
    def moment(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        return self._reader.moment(kind, below(self._policy, name), box)

    @override
    def critic_weight(self, name: str, box: Box | None = None) -> Tensor:
        return self._reader.critic_weight(below(self._policy, name), box)

    @override
    def critic_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._own(self._reader.critic_shapes())

    @override
    def adapter(self, name: str, box: Box | None = None) -> Tensor:
        return self._reader.adapter(below(self._policy, name), box)

    @override
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._own(self._reader.adapter_shapes())

    @override
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._own(self._reader.weight_shapes())

    @override
    def moment_kinds(self) -> set[str]:
        return self._reader.moment_kinds() - {STEPS_KIND}

    @override
    def moment_names(self) -> set[str]:
        names = dict.fromkeys(self._reader.moment_names(), 0)
        return self._own(names).keys() - {STEPS_KIND}

    @property
    @override
    def optimizer_steps(self) -> int:
        if not self._policy:
            return self._reader.optimizer_steps
        return int(self.moment(STEPS_KIND, STEPS_KIND))

    def _own(self, found: Mapping[str, Value]) -> dict[str, Value]:
        """Those of the policy, by their own names."""
        named = {own_name(name): value for name, value in found.items()}
        return {name: value for (policy, name), value in named.items() if policy == self._policy}


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for needed in parts:
        for name, size in needed.items():
            total[name] = total.get(name, 0) + size
    return total


def _joined(facts: Iterable[ReferenceFacts | None]) -> ReferenceFacts | None:
    """Of all that there are, as one."""
    found = [each for each in facts if each is not None]
    if len(found) < 2:
        return found[0] if found else None
    digest = digest_bytes("".join(each.digest for each in found).encode())
    return ReferenceFacts(", ".join(each.name for each in found), digest)
