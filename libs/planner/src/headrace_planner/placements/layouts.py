"""Ways to use a run's devices in a step, and what a measured step says of each. Knows no run, no fleet and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

COLLOCATED, DISAGGREGATED, HYBRID = "collocated", "disaggregated", "hybrid"
OFFLOADED, RESIDENT = "offloaded", "resident"
PIPELINED, SEQUENTIAL = "pipelined", "sequential"
Style = tuple[str, str]
"""A mode and how it is carried out: collocated offloaded or resident, the others pipelined or sequential."""


def style_words(mode: str, style: str) -> str:
    """A style for people; hybrid has one."""
    return mode if mode == HYBRID else f"{mode} {style}"


@dataclass(frozen=True)
class Layout:
    """How many devices generate, and how many learn beside them or in turns with them.

    In `hybrid` those that generate learn too, once the step's answers are complete.
    """

    generate: int
    learn: int
    mode: str
    style: str

    @property
    def in_turns(self) -> bool:
        """Whether the same devices generate and learn."""
        return self.mode == COLLOCATED

    @property
    def all(self) -> int:
        """Its devices."""
        return self.generate if self.in_turns else self.generate + self.learn

    @property
    def words(self) -> str:
        """For people."""
        style = style_words(self.mode, self.style)
        if self.in_turns:
            return f"{style} on {self.generate}"
        then = f", then {self.all} learn" if self.mode == HYBRID else ""
        return f"{style}, {self.generate} generate and {self.learn} learn{then}"


@dataclass(frozen=True)
class StepTime:
    """One measured step: seconds of its stages' work, and of all of it.

    Of the learning, `after` was done once the last answer was made. `switch` is what passed while devices changed hands
    and weights were published and installed; of that, `moved` while memory was released or taken.
    """

    generate: float
    learn: float
    step: float
    after: float = 0.0
    switch: float = 0.0
    moved: float = 0.0

    @property
    def rest(self) -> float:
        """Seconds in which nothing is generated or learned."""
        return max(0.0, self.step - self.generate - self.after)


@dataclass(frozen=True)
class Shape:
    """What a step is: its groups, and whether they are learned from one by one as they settle."""

    groups: int
    group_size: int
    streams: bool
    ahead: bool = False
    """Whether answers of next steps are made meanwhile (`max_staleness` above 0): the slower side is the step."""

    @property
    def items(self) -> int:
        """Trajectories of a step."""
        return self.groups * self.group_size


def typical(steps: Sequence[StepTime]) -> StepTime:
    """Medians of measured steps."""
    fields = ("generate", "learn", "step", "after", "switch", "moved")
    return StepTime(*(median(getattr(step, name) for step in steps) for name in fields))
