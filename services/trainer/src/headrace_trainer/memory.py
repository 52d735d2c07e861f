"""What a run's state needs of memory on one rank, and whether the rank has it. Knows no model.

The figures are a lower bound: activations, prompts and what libraries take are not in them. So a run that is refused
could not have gone through a step, and one that is taken may still run out of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from headrace_modelkit.device_memory import MOST_COPIES, SPARE_BYTES
from headrace_modelkit.devices import free_bytes, total_bytes, used_bytes
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.memory.allocator import resident_bytes
from headrace_servicekit.memory.capacity import host_memory

from headrace_trainer.algorithms._base import Algorithm, Barrier
from headrace_trainer.errors import Refusal, invalid

GIB = 2**30
TOKEN_BYTES = 120
"""Of a kept answer's token: id, position, engine log-prob and version, as entries of lists and their objects."""
COPY = "checkpoint copy"
"""Part of the host's memory: what a rank writes behind training, as it was at the step's end."""
LENT = "lent versions"
"""Part of the leader's GPU: copies that engines of its host map (`cuda_ipc`), of the version they read and the next."""
LEADERS = {"published versions", "published base", "kept groups"}
"""Parts that the leader alone has."""
VALUE_BYTES = 40
"""Of a token's value of a column, an advantage or a return: entry and float in a list, a float64 in a tensor."""


@dataclass(frozen=True)
class Tried:
    """A layout with its bytes of a rank, and whether they were found to fit."""

    layout: str
    device: int
    host: int
    fits: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for. On a CPU `device` is empty: there everything is in host memory.

    `tried` are the layouts that came before `layout` in the order of cost, and it: why it was chosen. With
    `saves_in_place` the host has no room for COPY: a checkpoint is written from the state itself while training waits.
    """

    host: Mapping[str, int]
    device: Mapping[str, int]
    layout: str = ""
    tried: tuple[Tried, ...] = ()
    saves_in_place: bool = False
    lends: bool = True
    """Whether there is room for LENT, where the run asks for it; else its engines read the host's memory (`shm`)."""
    would_fit: str | None = ""
    """How many ranks would have room, where these have not; None where no number of them has."""

    @property
    def reason(self) -> str:
        """The layout, what it needs, and what the cheaper ones would have; empty where there is but one."""
        if not self.layout:
            return ""
        where = "GPU memory" if self.device else "host memory"
        own = sum((self.device or self.host).values())
        words = f"{self.layout}: a rank needs {_gib(own)} GiB of {where}"
        if self.device and any(part in self.host for part in ("moments", "masters")):
            words += f" and {_gib(sum(self.host.values()))} of the host's"
        others = [each for each in self.tried if each.layout != self.layout]
        if others:
            words += "; what costs less does not fit: "
            words += ", ".join(f"{each.layout} needs {_gib(each.device or each.host)}" for each in others)
        if self.saves_in_place:
            words += "; the host has no room for a copy of the state, so training waits while a checkpoint is written"
        if not self.lends:
            words += (
                "; beside it the leader's GPU has no room for versions to lend, so cuda_ipc gives way to shm"
            )
        return words

    def figures(self) -> dict[str, float]:
        """For people: what Restore answers."""
        sums = {
            "planned_host_bytes": sum(self.host.values()),
            "planned_device_bytes": sum(self.device.values()),
        }
        return {name: float(size) for name, size in sums.items() if size}


@dataclass(frozen=True)
class Room:
    """Bytes that a rank can have: `free`, with those that it has already, of `total`."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Rooms:
    """What a rank can have of its host's memory and, unless it computes on the CPU, of its GPU's."""

    host: Room
    device: Room | None
    base: bool | None = None
    """Whether frozen weights that the host's processes share are there already; None where they are not shared."""


def rooms_on(device: torch.device) -> Rooms:
    """As they are now; what is loaded already is dropped before anything is loaded anew."""
    memory = host_memory()
    host = Room("host memory", memory.available + resident_bytes(), memory.total)
    if device.type == "cpu":
        return Rooms(host, None)
    free = free_bytes(device) + used_bytes(device)
    return Rooms(host, Room("GPU memory", free, total_bytes(device)))


def kept_bytes(config: TrainerConfig, algorithm: Algorithm) -> int:
    """Host memory of the groups that the leader keeps until the commit, with their columns; 0 where none are kept.

    All answers as long as `sampling.max_new_tokens` lets them be.
    """
    if algorithm.barrier is not Barrier.BATCH:
        return 0
    samples = config.algorithm.prompts_per_step * config.algorithm.group_size
    made = 1 + (algorithm.critic is not None)  # advantages, and returns
    each = TOKEN_BYTES + VALUE_BYTES * (len(algorithm.columns) + made)
    return samples * config.sampling.max_new_tokens * each


def lent_bytes(config: TrainerConfig, version_bytes: int) -> int:
    """Of the leader's GPU, for versions of so many bytes; 0 where no engine on another device maps them."""
    weights = config.weights
    lends = "cuda_ipc" in weights.transports and config.placement.mode == "disaggregated"
    return MOST_COPIES * version_bytes if lends and weights.publish == "leader" else 0


def with_room_to_lend(plan: MemoryPlan, rooms: Rooms, margin: float = 1.0) -> MemoryPlan:
    """The plan, without what is lent where the GPU has no room for it: no layout is chosen for it that costs steps."""
    if rooms.device is None or not plan.device.get(LENT):
        return plan
    if margin * sum(plan.device.values()) + SPARE_BYTES <= rooms.device.free:
        return plan
    return replace(
        plan, device={part: size for part, size in plan.device.items() if part != LENT}, lends=False
    )


def host_bytes(plan: MemoryPlan, ranks_here: int) -> int:
    """Of the leader's host, which has so many ranks: what only the leader keeps is there once."""
    return sum(size * (1 if part in LEADERS else ranks_here) for part, size in plan.host.items())


def check_host(plan: MemoryPlan, rooms: Rooms, ranks_here: int) -> None:
    """Raises Refusal INVALID or MEMORY_SHORT where a host has not what its ranks need between them."""
    needed = {part: size * (1 if part in LEADERS else ranks_here) for part, size in plan.host.items()}
    who = f"its {ranks_here} ranks need" if ranks_here > 1 else ""
    check_room(needed, rooms.host, plan.tried, who=who, would_fit=plan.would_fit)


def check_rooms(plan: MemoryPlan, rooms: Rooms) -> None:
    """Raises Refusal INVALID where a plan can never fit, MEMORY_SHORT where it does not fit at the moment."""
    check_room(plan.host, rooms.host, plan.tried, would_fit=plan.would_fit)
    if rooms.device is not None:
        check_room(plan.device, rooms.device, plan.tried, would_fit=plan.would_fit)


def check_room(
    needed: Mapping[str, int],
    room: Room,
    tried: Sequence[Tried] = (),
    *,
    who: str = "",
    would_fit: str | None = "",
) -> None:
    """As `check_rooms`, of one memory; the message has the table of the layouts that were `tried`. `who` needs it: by
    default a rank.
    """
    total = sum(needed.values())
    if total <= room.free:
        return
    parts = ", ".join(
        f"{name} {_gib(size)}" for name, size in sorted(needed.items(), key=lambda part: -part[1]) if size
    )
    never = total > room.total
    has = (
        f"there are {_gib(room.total)} GiB"
        if never
        else f"{_gib(room.free)} of {_gib(room.total)} GiB are free"
    )
    message = (
        f"trainer.ranks: {who or 'a rank needs'} at least {_gib(total)} GiB of {room.name}, and {has} ({parts}); "
        f"{_fixes(needed, would_fit, room, short=not never)}"
    )
    if len(tried) > 1:
        message += f". Tried, the cheapest first:\n{_table(tried)}"
    raise invalid(message, key="trainer.ranks") if never else Refusal("MEMORY_SHORT", message, "exhausted")


def _table(tried: Sequence[Tried]) -> str:
    rows = [("layout", "GPU GiB", "host GiB")]
    rows += [(each.layout, _gib(each.device) if each.device else "-", _gib(each.host)) for each in tried]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {device:>{widths[1]}}  {host:>{widths[2]}}" for name, device, host in rows
    )


def _fixes(needed: Mapping[str, int], would_fit: str | None, room: Room, *, short: bool) -> str:
    ranks = would_fit or "give more ranks, which share the model's state"
    fixes = [f"give more {room.name}: more ranks alone do not help" if would_fit is None else ranks]
    if needed.get("activations", 0) + needed.get("head", 0) > sum(needed.values()) // 4:
        fixes.append("a smaller trainer.micro_batch_tokens")
    if needed.get("reference"):
        fixes.append("a smaller trainer.reference, or model.dtype: bfloat16 for it")
    if needed.get("hold"):
        fixes.append("epochs: 1 and minibatches: 1, which hold nothing to go back to")
    if needed.get(COPY):
        fixes.append("checkpoint.enabled: false, which copies nothing")
    if needed.get("kept groups"):
        fixes.append("fewer algorithm.prompts_per_step or sampling.max_new_tokens")
    if short:
        own = room.name == "GPU memory" and needed.get("frozen weights")
        fixes.append(
            f"fewer runs at a time there{', each of which has frozen weights of its own' if own else ''}"
        )
    return "; or ".join(fixes)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
