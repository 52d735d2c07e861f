"""Distribution of output lengths: how long the tail decodes, and when a share of the work has arrived.

Knows no devices: the caller gives the ratio of the costs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from headrace_planner.errors import refuse

POINTS = 400
BISECTIONS = 60


@dataclass(frozen=True)
class Lengths:
    """Equally likely output lengths, rising, in any unit (tokens, turns); only ratios matter.

    `group_correlation` says how alike the lengths of one group's members are: at 1 a group is complete when any
    of its members is; at 0 they are independent, and a group of 16 waits for the longest of 16. `group`: outputs of
    one group, so that `count` outputs are as good as `count * group ** -group_correlation` independent ones.
    """

    values: tuple[float, ...]
    group_correlation: float = 1.0
    group: int = 1

    @classmethod
    def from_quantiles(
        cls, quantiles: Mapping[float, float], group_correlation: float = 1.0, group: int = 1
    ) -> Lengths:
        """Lengths from quantiles joined by straight lines from length 0; the last is quantile 1, the longest.

        PlanError when quantile 1 is missing or the lengths do not rise.

        >>> round(Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}).mean)
        65
        """
        points = sorted(quantiles.items())
        if not points or points[-1][0] != 1 or points[0][0] < 0:
            raise refuse("lengths.quantiles", "quantile 1 (the longest) is missing", "add it, such as 1: 260")
        if any(b[1] < a[1] for a, b in pairwise(points)) or points[0][1] <= 0:
            raise refuse("lengths.quantiles", f"lengths {[x for _, x in points]} do not rise", "sort them")
        if not 0 <= group_correlation <= 1:
            raise refuse("lengths.group_correlation", f"{group_correlation} is not in 0..1", "use 0 to 1")
        shares = [(index + 0.5) / (POINTS - 1) for index in range(POINTS - 1)]
        joined = [(0.0, 0.0), *points]
        values = (*(_at(joined, share) for share in shares), points[-1][1])
        return cls(values, group_correlation, group)

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.values) / len(self.values)

    @cached_property
    def stretch(self) -> float:
        """Longest length over mean length, at least 1."""
        return self.values[-1] / self.mean

    def scaled(self, mean: float, limit: float) -> Lengths:
        """The same shape with another mean, cut at `limit` (what a length limit does to a tail).

        PlanError when the mean is not below the limit.
        """
        if not 0 < mean < limit:
            raise refuse(
                "lengths.mean", f"a mean of {mean:g} is not below the limit {limit:g}", "raise the limit"
            )
        low, high = 0.0, mean / self.mean
        while _cut_mean(self.values, high, limit) < mean and high * self.values[0] < limit:
            low, high = high, 2 * high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_mean(self.values, middle, limit) < mean else (low, middle)
        return replace(self, values=tuple(min(high * value, limit) for value in self.values))

    def expected_longest(self, count: float) -> float:
        """Expected longest of `count` outputs, in mean lengths: at least 1, at most `stretch`.

        >>> tail = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}, group=16)
        >>> [round(tail.expected_longest(count), 2) for count in (16, 512, 8192)], round(tail.stretch, 2)
        ([1.0, 3.03, 3.96], 3.98)
        """
        found = self._known_longest.get(count)
        if found is None:
            draws = max(1.0, count * self.group**-self.group_correlation)
            shorter = enumerate(pairwise(self.values), 1)
            size = len(self.values)
            short = sum((b - a) * (index / size) ** draws for index, (a, b) in shorter)
            found = self._known_longest[count] = (self.values[-1] - short) / self.mean
        return found

    def arrivals(
        self, fixed: float, marginal: float, group: int, chunks: int, count: float = math.inf
    ) -> tuple[float, ...]:
        """When each of `chunks` equal parts of the work of `count` outputs is complete, as shares of the time until
        the last.

        All sequences begin together. Decoding one mean length takes `fixed` seconds, and `marginal` more when
        all sequences are still decoding; so decoding gets faster as sequences finish, and the tail runs at `fixed`.
        By any length the expected share of the work is the distribution's; the last part ends with the longest.
        """
        longest = self.expected_longest(count)
        known = self._marks(group ** (1 - self.group_correlation) - 1, chunks)
        marks = [(min(length, longest), decoding) for length, decoding in known[:-1]] + [(longest, 1.0)]
        end = fixed * marks[-1][0] + marginal * marks[-1][1]
        return tuple((fixed * length + marginal * decoding) / end for length, decoding in marks)

    def crowd(self, power: float) -> float:
        """Integral over length, in mean lengths, of the share of outputs still decoding to a power; 1 at power 1."""
        size, before, total = len(self.values), 0.0, 0.0
        for index, value in enumerate(self.values):
            total += (value - before) * ((size - index) / size) ** power
            before = value
        return total / self.mean

    def unfinished(self, length: float) -> float:
        """Share of outputs longer than `length` mean lengths."""
        return 1 - bisect_right(self.values, length * self.mean * (1 + 1e-12)) / len(self.values)

    def decoded(self, length: float) -> float:
        """Mean of what outputs have of their first `length` mean lengths, in mean lengths."""
        at = bisect_right(self.values, length * self.mean)
        return (self._sums[at] + (len(self.values) - at) * length * self.mean) / (
            len(self.values) * self.mean
        )

    def arrived(self, length: float, group: int) -> float:
        """Work of the groups that are complete when all decode their `length`-th mean length, in mean lengths."""
        unfinished = self.unfinished(length)
        order: float = group ** (1 - self.group_correlation) - 1
        return (self.decoded(length) - length * unfinished) * float((1 - unfinished) ** order)

    def longest(self, count: float, beyond: float = 0.0) -> float:
        """About the longest of `count` outputs that are all longer than `beyond` mean lengths, in mean lengths."""
        at = bisect_right(self.values, beyond * self.mean * (1 + 1e-12))
        left = len(self.values) - at
        if not left:
            return beyond
        place = min(left - 1, int(left * (1 - 0.5 / max(count, 0.5))))
        return self.values[at + place] / self.mean

    @cached_property
    def _sums(self) -> list[float]:
        return list(accumulate(self.values, initial=0.0))

    @cached_property
    def _known_longest(self) -> dict[float, float]:
        return {}

    @cached_property
    def _known_marks(self) -> dict[tuple[float, int], list[tuple[float, float]]]:
        return {}

    def _marks(self, order: float, chunks: int) -> list[tuple[float, float]]:
        """For each chunk (length at which it is complete, mean of min(length, this one)), over the mean length."""
        known = self._known_marks.get((order, chunks))
        if known is not None:
            return known
        total, count = sum(self.values), len(self.values)
        before = work = decoding = 0.0
        marks: list[tuple[float, float]] = []
        for index, value in enumerate(self.values):
            decoding += (value - before) * (count - index) / count
            before, work = value, work + value
            arrived = work / total * ((index + 1) / count) ** order
            while len(marks) < chunks and arrived >= (len(marks) + 1) / chunks - 1e-9:
                marks.append((value / self.mean, decoding / self.mean))
        marks += [(self.stretch, 1.0)] * (chunks - len(marks))
        return self._known_marks.setdefault((order, chunks), marks)


def _at(points: list[tuple[float, float]], share: float) -> float:
    for (p0, x0), (p1, x1) in pairwise(points):
        if share <= p1:
            return x0 + (x1 - x0) * (share - p0) / (p1 - p0) if p1 > p0 else x1
    return points[-1][1]


def _cut_mean(values: tuple[float, ...], scale: float, limit: float) -> float:
    return sum(min(scale * value, limit) for value in values) / len(values)
