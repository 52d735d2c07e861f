"""Compares layouts on a machine whose speed changes: short blocks of their steps by turns (A B A B).

A block is compared with what the other layout would have taken at that time, by its blocks before and after. So a
machine that gets steadily faster or slower favours none of them, and the median leaves out a block in which something
else had the machine. A comparison ends when its blocks agree by more than they differ, or when there were enough.

Knows no run and no clock: measured steps in, what to measure next and the layouts' comparable seconds out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from headrace_planner.placements.layouts import Layout, StepTime, typical

MOST_ROUNDS, CHALLENGES = 4, 2
"""Most blocks of each layout; and of a layout that is compared with the present best (the champion) alone."""
CLEAR = 2.0
"""A comparison is clear when the median of its ratios is more than this many times their spread."""
NO_MATTER = 0.03
"""Layouts whose difference is certainly below this share are not compared further."""
LEAST_S = 1e-9


@dataclass
class Block:
    """Consecutive steps of one layout; `place`: the block's number among all blocks."""

    place: int
    steps: list[StepTime]

    @property
    def log_s(self) -> float:
        """Logarithm of its median step's seconds."""
        return math.log(max(LEAST_S, median(step.step for step in self.steps)))


class Trial:
    """Measures some layouts of one run by turns.

    `window`: about the number of steps that are measured of each layout: at most a third more, and a third fewer where
    the layouts differ clearly. With a window of 1 each layout is measured once, in sequence.

    With a `champion` and its steps, a layout that is predicted to be faster is compared with it alone: in two blocks,
    or in one block if that is slower already.
    """

    def __init__(self, window: int, champion: Layout | None = None, steps: Sequence[StepTime] = ()) -> None:
        self._window, self._block = window, max(1, window // 3)
        self._rounds = min(MOST_ROUNDS if champion is None else CHALLENGES, max(1, window + window // 3))
        self._champion = champion
        self._blocks: dict[Layout, list[Block]] = {}
        self._lost: set[Layout] = set()
        if champion is not None:
            self._blocks[champion] = [Block(0, [*steps] * self._block)]

    def add(self, layout: Layout, step: StepTime) -> None:
        """Adds a measured step of a layout."""
        blocks = self._blocks.setdefault(layout, [])
        if not blocks or self._is_whole(blocks[-1]):
            blocks.append(Block(sum(map(len, self._blocks.values())), []))
        blocks[-1].steps.append(step)

    def drop(self, layout: Layout) -> None:
        """Ends the measuring of a layout that is not available any more."""
        self._lost.add(layout)

    def full(self, layout: Layout) -> bool:
        """Whether a layout has at least one block and all its blocks are complete."""
        blocks = self._blocks.get(layout, [])
        return bool(blocks) and self._is_whole(blocks[-1])

    @property
    def layouts(self) -> list[Layout]:
        """Layouts with a complete block, in the order of the first round."""
        return [layout for layout in self._blocks if self._whole(layout)]

    def following(self) -> Layout | None:
        """The layout to measure next; None once the comparison is over."""
        contenders = self._contenders()
        if not contenders:
            return None
        made = min(map(self._whole, contenders))
        if len(self._blocks) == 1 and made * self._block < self._window:
            return contenders[0]  # There is nothing to compare it with: all its steps count.
        if made and (len(contenders) == 1 or made >= self._rounds):
            return None
        return next(layout for layout in contenders if self._whole(layout) == made)

    def times(self) -> dict[Layout, StepTime]:
        """Seconds of a step by layout, all at the speed that the machine had for the most measured layout.

        The parts of a step are in the proportion in which they were measured; the whole step comes from the median
        ratio of the comparisons.
        """
        if not (known := self.layouts):
            return {}
        most = max(known, key=self._whole)
        base = typical(self._steps(most))
        found = {most: base}
        for layout in known:
            if layout != most:
                own = typical(self._steps(layout))
                ratio = math.exp(median(self._ratios(layout, most)))
                found[layout] = scaled(own, ratio * base.step / max(own.step, LEAST_S))
        return found

    def words(self, best: Layout) -> str:
        """A sentence: how certain it is that `best` is faster; empty where each layout was measured once."""
        rivals = [layout for layout in self.layouts if layout != best]
        times = self.times()
        if best not in times or not rivals:
            return ""
        rival = min(rivals, key=lambda layout: times[layout].step)
        ratios = self._ratios(rival, best)
        if len(ratios) < 2:
            return ""
        faster = sum(ratio > 0 for ratio in ratios)
        low, high = (round(100 * math.expm1(each)) for each in (min(ratios), max(ratios)))
        return f"by turns {rival.words} took {low:+d} to {high:+d}% longer ({faster} of {len(ratios)} comparisons)"

    def newest(self, layout: Layout) -> list[StepTime]:
        """The newest block of a layout; empty where it was not measured."""
        blocks = self._blocks.get(layout)
        return list(blocks[-1].steps) if blocks else []

    def _contenders(self) -> list[Layout]:
        times = self.times()
        leader = min(times, key=lambda layout: times[layout].step, default=None)
        return [
            layout
            for layout in self._blocks
            if layout not in self._lost
            and (leader is None or layout == leader or not self._decided(layout, leader))
        ]

    def _decided(self, layout: Layout, leader: Layout) -> bool:
        """Whether the comparisons of two layouts are clear, or show that the difference does not matter."""
        least = min(self._whole(layout), self._whole(leader))
        if least < 2:
            return bool(least) and leader == self._champion
        ratios = self._ratios(layout, leader)
        middle, spread = abs(median(ratios)), max(ratios) - min(ratios)
        return middle > CLEAR * spread or middle + spread < NO_MATTER

    def _ratios(self, one: Layout, other: Layout) -> list[float]:
        """Logarithms of how much longer one took than the other, at each block between two of the other layout's."""
        mine, theirs = (
            [block for block in self._blocks[each] if self._is_whole(block)] for each in (one, other)
        )
        found = [
            block.log_s - beside for block in mine if (beside := _between(theirs, block.place)) is not None
        ]
        found += [
            beside - block.log_s for block in theirs if (beside := _between(mine, block.place)) is not None
        ]
        return found or [mine[-1].log_s - theirs[-1].log_s]

    def _steps(self, layout: Layout) -> list[StepTime]:
        return [step for block in self._blocks[layout] for step in block.steps]

    def _whole(self, layout: Layout) -> int:
        """Whole blocks of a layout."""
        return sum(map(self._is_whole, self._blocks.get(layout, ())))

    def _is_whole(self, block: Block) -> bool:
        return len(block.steps) >= self._block


def merged(known: Mapping[Layout, StepTime], newer: Mapping[Layout, StepTime]) -> dict[Layout, StepTime]:
    """Seconds of two comparisons by layout; the older ones are scaled by a layout that is in both."""
    both = next((layout for layout in newer if layout in known), None)
    factor = newer[both].step / max(known[both].step, LEAST_S) if both else 1.0
    return {**{layout: scaled(time, factor) for layout, time in known.items()}, **newer}


def scaled(time: StepTime, factor: float) -> StepTime:
    """The step with all its seconds multiplied by `factor`."""
    return replace(time, **{name: value * factor for name, value in vars(time).items()})


def _between(blocks: Sequence[Block], place: int) -> float | None:
    """Logarithm of a block's seconds at `place`, interpolated between two blocks; None outside all of them."""
    for before, after in pairwise(blocks):
        if before.place < place < after.place:
            share = (place - before.place) / (after.place - before.place)
            return before.log_s + share * (after.log_s - before.log_s)
    return None
