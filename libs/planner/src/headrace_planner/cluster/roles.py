"""What devices of an elastic step are at a time: a rollout replica, a helper, the trainer group. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_planner.cluster.decoding import Replica
from headrace_planner.cluster.spans import Label, Place, Timeline


class Lane:
    """Adjacent devices whose labels follow one another without gaps."""

    def __init__(self, place: Place, timeline: Timeline, begin: float) -> None:
        self.place, self.timeline, self.now = place, timeline, begin

    def until(self, when: float, stage: str, label: Label, items: float = 0.0) -> None:
        """Labels the devices from where the last label ended."""
        if when > self.now:
            self.timeline.add(self.place, self.now, when, stage, label, items)
            self.now = when


@dataclass
class Decoder:
    """A rollout replica with its devices. `last`: when it finished its last output."""

    name: str
    lane: Lane
    replica: Replica
    owner: bool
    last: float
    finished: int = 0


@dataclass(frozen=True)
class Group:
    """A settled group: since when, its items and its work in items of mean length."""

    since: float
    items: list[int]
    weight: float


@dataclass(order=True)
class Learner:
    """A helper, or the trainer group, free at some time. `begun`: (since, groups) that it learns until then."""

    free: float
    number: int
    lanes: list[Lane] = field(compare=False)
    owner: bool = field(default=False, compare=False)
    learned: int = field(default=0, compare=False)
    begun: tuple[float, list[Group]] | None = field(default=None, compare=False)
