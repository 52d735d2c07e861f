"""Which rows of a ring are drawn: all alike, by priority, or the newest more often. Knows no files.

The same numbers of a generator and the same rows draw the same. Shapes: N rows, B draws.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace_robots.trainer.replay.ring import Ring

Draws = Literal["uniform", "prioritised", "recent"]
LEAST = 1e-6
"""Added to a temporal difference, so that nothing has no priority."""


class Drawer:
    """Draws rows of a ring."""

    def __init__(
        self, ring: Ring, draws: Draws, *, exponent: float, correction: float, recency: float
    ) -> None:
        self._ring, self._draws = ring, draws
        self._exponent, self._correction, self._recency = exponent, correction, recency
        self._tree = SumTree(ring.capacity) if draws == "prioritised" else None

    def changed(self, places: np.ndarray) -> None:
        """Rows at these places have other priorities, or are dropped."""
        if self._tree is not None:
            self._tree.set(places, self._ring.priorities_N[places].astype(np.float64) ** self._exponent)

    def dropped(self, places: np.ndarray) -> None:
        """Rows at these places are dropped."""
        if self._tree is not None:
            self._tree.set(places, np.zeros(len(places)))

    def draw(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(B,) row numbers, and (B,) weights of their losses: 1 but of prioritised draws, whose largest is 1."""
        if self._tree is not None:
            return self._by_priority(count, generator)
        ring, rows_B = self._ring, np.zeros(count, np.int64)
        missing = np.arange(count)
        while len(missing):  # no transition begins at what an episode ended with
            share = generator.random(len(missing))
            if self._draws == "recent":
                share = 1.0 - share**self._recency
            rows_B[missing] = ring.first + np.minimum((share * len(ring)).astype(np.int64), len(ring) - 1)
            missing = missing[ring.left_N[ring.places(rows_B[missing])] == 0]
        return rows_B, np.ones(count)

    def _by_priority(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Schaul et al. 2016: one draw in each of B equal shares of the sum."""
        ring, tree = self._ring, self._tree
        assert tree is not None
        targets_B = (np.arange(count) + generator.random(count)) * (tree.total / count)
        at_B = tree.find(targets_B)
        # The number of the row that lies there: the ring's oldest row is the first of its round.
        rows_B = ring.first + (at_B - ring.first) % ring.capacity
        chance_B = tree.values(at_B) / tree.total
        weights_B = (len(ring) * chance_B) ** -self._correction
        return rows_B, weights_B / weights_B.max()


class SumTree:
    """Sums of numbers by halves, so that one can be drawn in proportion in log N steps."""

    def __init__(self, capacity: int) -> None:
        self._leaves = 1 << max(1, (capacity - 1).bit_length())
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all."""
        return float(self._sums[1])

    def values(self, places: np.ndarray) -> np.ndarray:
        """The numbers at these places."""
        found: np.ndarray = self._sums[places + self._leaves]
        return found

    def set(self, places: np.ndarray, values: np.ndarray) -> None:
        """Puts numbers at these places, none of them twice."""
        nodes = places + self._leaves
        self._sums[nodes] = values
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, targets: np.ndarray) -> np.ndarray:
        """The places at which the sum of what comes first passes these targets."""
        nodes, left = np.ones(len(targets), np.int64), targets.copy()
        while nodes[0] < self._leaves:
            nodes = 2 * nodes
            below = self._sums[nodes]
            # A half that is empty is never entered, whatever rounding has left of a target.
            right = (left >= below) & (self._sums[nodes + 1] > 0)
            left = np.where(right, left - below, left)
            nodes = nodes + right
        return nodes - self._leaves
