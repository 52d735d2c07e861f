"""What an evaluation's scores say of the model, and whether another one is better on the same items. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import msgspec

Z95 = 1.959964
"""Standard deviations of a normal distribution between its 2.5% and 97.5% quantiles, halved."""
DRAWS, FEWEST_RESAMPLES, MOST_RESAMPLES = 1_000_000, 1000, 4000
"""A bootstrap draws about so many items in all, within these bounds of resamples."""
TAIL = 0.025


def interval(scores: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95% interval of the mean score; `scores` has the answers' scores, prompt by prompt.

    Prompts are what is drawn at random, so answers of one prompt count as one draw. One 0-or-1 score a prompt gives
    Wilson's interval (Wilson 1927), which is right near 0 and 1 too; otherwise the normal one of the prompts' means.
    None for fewer than two prompts.
    """
    means = [fmean(each) for each in scores if each]
    count = len(means)
    if count < 2:
        return None
    mean = fmean(means)
    if all(len(each) == 1 and each[0] in (0.0, 1.0) for each in scores):
        centre = (mean + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
        half = Z95 / (1 + Z95**2 / count) * sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
        return max(0.0, centre - half), min(1.0, centre + half)
    half = Z95 * stdev(means) / sqrt(count)
    return mean - half, mean + half


def pass_at(scores: Sequence[Sequence[float]], threshold: float) -> dict[int, float]:
    """k → pass@k for k of 1, 2, 4, … and all answers of a prompt: the chance that one of k passes.

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n - c, k) / C(n, k) for one with
    c of n answers at or above `threshold`. Empty unless every prompt has the same number of answers.
    """
    sizes = {len(each) for each in scores}
    if len(sizes) != 1 or (total := sizes.pop()) == 0:
        return {}
    passed = [sum(score >= threshold for score in each) for each in scores]
    wanted = {2**power for power in range(total.bit_length()) if 2**power <= total} | {total}
    return {
        k: fmean(1.0 - comb(total - count, k) / comb(total, k) for count in passed) for k in sorted(wanted)
    }


def item_values(
    mode: str, rewards: Sequence[Sequence[float]], choices: Sequence[Sequence[str]], threshold: float
) -> list[float]:
    """The figure of each item in a mode (greedy, avg@K, pass@K, maj@K), whose mean is the evaluation's.

    `rewards` and `choices` have an item's answers in order: what each is worth, and what was extracted from it ("":
    nothing). avg and maj take the first K, pass all of them.
    """
    kind, _, number = mode.partition("@")
    k = int(number or 1)
    if kind == "pass":
        passed = [(len(each), sum(reward >= threshold for reward in each)) for each in rewards]
        return [1.0 - comb(total - count, k) / comb(total, k) for total, count in passed]
    if kind == "maj":
        return [_majority(own[:k], chosen[:k]) for own, chosen in zip(rewards, choices, strict=True)]
    return [fmean(each[:k]) for each in rewards]


def _majority(rewards: Sequence[float], choices: Sequence[str]) -> float:
    """Mean reward of the most frequent choice, of the earliest one of several; an answer without one abstains."""
    votes: dict[str, list[float]] = {}
    for reward, choice in zip(rewards, choices, strict=True):
        if choice:
            votes.setdefault(choice, []).append(reward)
    winner = max(votes.values(), key=len, default=list(rewards))
    return fmean(winner)


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
