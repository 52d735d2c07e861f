"""What a run's state needs of memory on one rank, and whether the rank has it. Knows no model.

The figures are a lower bound: activations, prompts and what libraries take are not in them. So a run that is refused
could not have gone through a step, and one that is taken may still run out of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm, Barrier
from headrace_trainer.errors import Refusal, invalid

GIB = 2**30
TOKEN_BYTES = 120
"""Of a kept answer's token: id, position, engine log-prob and version, as entries of lists and their objects."""
VALUE_BYTES = 40
"""Of a token's value of a column, an advantage or a return: entry and float in a list, a float64 in a tensor."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for. On a CPU `device` is empty: there everything is in host memory."""

    host: Mapping[str, int]
    device: Mapping[str, int]

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


def check_room(needed: Mapping[str, int], room: Room) -> None:
    """Raises Refusal INVALID where it can never fit, MEMORY_SHORT where it does not fit at the moment."""
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
        f"trainer.ranks: a rank needs at least {_gib(total)} GiB of {room.name}, and {has} ({parts}); "
        f"{_fixes(needed)}"
    )
    raise invalid(message, key="trainer.ranks") if never else Refusal("MEMORY_SHORT", message, "exhausted")


def _fixes(needed: Mapping[str, int]) -> str:
    fixes = ["give more ranks, which share the model's state"]
    if needed.get("reference"):
        fixes.append("a smaller trainer.reference, or model.dtype: bfloat16 for it")
    if needed.get("hold"):
        fixes.append("epochs: 1 and minibatches: 1, which hold nothing to go back to")
    if needed.get("kept groups"):
        fixes.append("fewer algorithm.prompts_per_step or sampling.max_new_tokens")
    return "; or ".join(fixes)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
