"""Whether one evaluation is better than another on the same items: difference, interval, exact test. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb
from statistics import fmean

import msgspec

DRAWS, FEWEST_RESAMPLES, MOST_RESAMPLES = 1_000_000, 1000, 4000
"""A bootstrap draws about so many items in all, within these bounds of resamples."""
TAIL = 0.025


class Difference(msgspec.Struct, frozen=True):
    """Second minus first, over items."""

    first: float
    second: float
    low: float | None
    high: float | None
    wins: int
    losses: int
    ties: int
    p_value: float | None


def compare(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The paired difference of two figures of the same items, item by item."""
    gaps = [later - earlier for earlier, later in zip(first, second, strict=True)]
    wins, losses = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    low, high = bootstrap(gaps) or (None, None)
    binary = all(value in (0.0, 1.0) for value in (*first, *second))
    p_value = mcnemar(wins, losses) if binary else None
    ties = len(gaps) - wins - losses
    return Difference(fmean(first), fmean(second), low, high, wins, losses, ties, p_value)


def bootstrap(gaps: Sequence[float]) -> tuple[float, float] | None:
    """95% percentile interval of the mean (Efron 1979), from a seed of its own; None for fewer than two items."""
    count = len(gaps)
    if count < 2:
        return None
    rng = random.Random(0)  # the same comparison has the same interval
    resamples = min(MOST_RESAMPLES, max(FEWEST_RESAMPLES, DRAWS // count))
    means = sorted(sum(rng.choices(gaps, k=count)) / count for _ in range(resamples))
    last = resamples - 1
    return means[round(TAIL * last)], means[round((1 - TAIL) * last)]


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided p-value of the exact McNemar test: the binomial test of wins among wins and losses at 1/2."""
    total = wins + losses
    tail = sum(comb(total, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / (1 << total))
