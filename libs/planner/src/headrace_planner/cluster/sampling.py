"""Output lengths of one simulated step, drawn by a seed. Knows no devices and no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from random import Random

from headrace_planner.profiling.lengths import Lengths
from headrace_planner.trees.costs import Workload


@dataclass(frozen=True)
class Draws:
    """One step's items, numbered from 0: `lengths[stage][item]` in mean lengths, for stages that have lengths.

    `weights[item]`: the item's share of work in all other stages, which is the length that the source gave it.
    """

    lengths: dict[str, list[float]]
    weights: list[float]

    def weight(self, items: Sequence[int]) -> float:
        """Work of some items, in items of mean length."""
        return fsum(self.weights[item] for item in items)


def draw(work: Workload, seed: int, iteration: int) -> Draws:
    """The items of one step: the same for the same seed and iteration, whatever tree runs them."""
    count, group = round(work.items), work.workflow.group_size
    found = {}
    for stage in sorted(work.profiles):
        lengths = work.profiles[stage].lengths
        if lengths is not None:
            found[stage] = _lengths(lengths, count, group, Random(f"{seed}/{iteration}/{stage}"))
    source = work.source((1 << len(work.workflow.units)) - 1)
    return Draws(found, found[source] if source else [1.0] * count)


def _lengths(lengths: Lengths, count: int, group: int, random: Random) -> list[float]:
    """As the planner counts a group: the longest of `group ** (1 - group_correlation)` independent lengths."""
    independent = max(1, round(group ** (1 - lengths.group_correlation)))
    found: list[float] = []
    while len(found) < count:
        drawn = [random.choice(lengths.values) / lengths.mean for _ in range(independent)]
        found += [drawn[member * independent // group] for member in range(group)]
    return found[:count]
