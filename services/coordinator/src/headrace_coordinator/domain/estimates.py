"""What an evaluation's scores say of the model, and whether another one is better on the same items. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, pstdev, stdev

import msgspec

Z95 = 1.959964
"""Standard deviations of a normal distribution between its 2.5% and 97.5% quantiles, halved."""
DRAWS, FEWEST_RESAMPLES, MOST_RESAMPLES = 1_000_000, 1000, 4000
"""Items that a bootstrap draws in all, about, and the bounds of its resamples."""
TAIL = 0.025
ROUNDING = 1e-9
"""What equal figures may differ by."""


def interval(scores: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95% interval of the mean score; `scores` has the answers' scores, prompt by prompt.

    Prompts are what is drawn at random, so answers of one prompt count as one draw. Scores from 0 to 1 have Wilson's
    interval (Wilson 1927), which is right near 0 and 1 too, for the number of 0-or-1 draws that gives the same standard
    error as the prompts' means; for equal means, the number of prompts. Other scores have the normal interval of
    the prompts' means. None for fewer than two prompts, and for such scores that are all equal.
    """
    means = [fmean(each) for each in scores if each]
    count, answers = len(means), [score for each in scores for score in each]
    if count < 2:
        return None
    mean, spread = fmean(means), pstdev(means)
    if min(answers) < 0 or max(answers) > 1:
        half = Z95 * stdev(means) / sqrt(count)
        return (mean - half, mean + half) if spread > ROUNDING else None
    draws = count * mean * (1 - mean) / spread**2 if spread > ROUNDING else count
    if all(score in (0.0, 1.0) for score in answers):
        draws = min(draws, len(answers))
    return _wilson(mean, draws)


def _wilson(mean: float, draws: float) -> tuple[float, float]:
    centre = (mean + Z95**2 / (2 * draws)) / (1 + Z95**2 / draws)
    half = Z95 / (1 + Z95**2 / draws) * sqrt(mean * (1 - mean) / draws + Z95**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)


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
    """95% percentile interval of the mean (Efron 1979), with a fixed seed; None for fewer than two items.

    Equal gaps of scores from 0 to 1 have one too: the upper end of Wilson's interval for 0 differing items bounds it.
    """
    count = len(gaps)
    if count < 2:
        return None
    if max(gaps) - min(gaps) <= ROUNDING:
        off = _wilson(0.0, count)[1]
        return (max(-1.0, gaps[0] - off), min(1.0, gaps[0] + off)) if abs(gaps[0]) <= 1 else None
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
