"""Intervals of time: their union, its length, and what is left of one. Knows no stage."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Interval = tuple[float, float]


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def without(interval: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval."""
    left, (start, end) = [], interval
    for first, last in sorted(holes):
        if first > start and first < end:
            left.append((start, first))
        start = max(start, last)
    return [*left, (start, end)] if start < end else left


def joined(intervals: Iterable[Interval], most: float = float("inf")) -> list[Interval]:
    """The union of intervals, by time, as at most `most` ones: the smallest gaps are closed."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    while len(union) > most:
        gaps = [right[0] - left[1] for left, right in pairwise(union)]
        at = gaps.index(min(gaps))
        union[at : at + 2] = [(union[at][0], union[at + 1][1])]
    return union
