"""Ways to divide devices between two parts, the best ones first. Knows only how long each part would take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product

DENSE = 64
STEPS_AN_OCTAVE = 8
Counts = tuple[int, ...]
"""Devices of each kind, in the order of the kinds' names."""
Seconds = Callable[[Counts], float]


def ladder(most: int) -> list[int]:
    """Device counts that a part of several stages may get: all up to DENSE, then eight in every octave.

    >>> ladder(90)[-4:]
    [64, 72, 80, 88]
    """
    counts, step = list(range(1, min(most, DENSE) + 1)), DENSE // STEPS_AN_OCTAVE
    while counts and counts[-1] + step <= most:
        counts.append(counts[-1] + step)
        if counts[-1] >= 2 * step * STEPS_AN_OCTAVE:
            step *= 2
    return counts


@lru_cache(maxsize=4096)
def pairs(count: int, first_alone: bool, second_alone: bool) -> tuple[tuple[int, int], ...]:
    """Divisions of `count` devices, by the first part's devices. A part that is one stage takes any count."""
    rungs = ladder(count - 1)
    found = set()
    for mine in rungs:
        rest = count - mine
        found.add((mine, rest if second_alone else rungs[bisect_right(rungs, rest) - 1]))
        if first_alone:
            found.add((rest, mine))
    return tuple(sorted(found, key=lambda pair: (pair[0], -pair[1])))


@lru_cache(maxsize=4096)
def divisions(
    counts: Counts,
    shared: tuple[bool, ...],
    second_only: tuple[bool, ...],
    first_alone: bool,
    second_alone: bool,
) -> tuple[tuple[tuple[Counts, Counts], ...], ...]:
    """Rows of divisions: along a row the first part gets more devices of one kind, and the second part fewer.

    `shared`: kinds that both parts need. Other kinds go as a whole to the part that needs them.
    """
    options: list[Sequence[tuple[int, int]]] = []
    for count, both, theirs in zip(counts, shared, second_only, strict=True):
        if both:
            options.append(pairs(count, first_alone, second_alone))
        else:
            options.append([(0, count) if theirs else (count, 0)])
    long = next((index for index, both in enumerate(shared) if both), 0)
    rows = []
    for others in product(*(option for index, option in enumerate(options) if index != long)):
        row = [(*others[:long], pair, *others[long:]) for pair in options[long]]
        rows.append(tuple((tuple(a for a, _ in made), tuple(b for _, b in made)) for made in row))
    return tuple(rows)


def promising(
    rows: Sequence[Sequence[tuple[Counts, Counts]]],
    first: Seconds,
    second: Seconds,
    bound: Callable[[], float],
) -> Iterator[tuple[Counts, Counts, float, float]]:
    """Divisions of each row that may take less than `bound()`, from the balanced one outwards, and their seconds.

    `first` must not rise along a row and `second` must not fall; neither part may take longer than the whole.
    """
    for row in rows:
        middle = _balanced(row, first, second)
        for mine, theirs in row[middle:]:
            behind = second(theirs)
            if behind >= bound():
                break
            yield mine, theirs, first(mine), behind
        for mine, theirs in reversed(row[:middle]):
            ahead = first(mine)
            if ahead >= bound():
                break
            yield mine, theirs, ahead, second(theirs)


def _balanced(row: Sequence[tuple[Counts, Counts]], first: Seconds, second: Seconds) -> int:
    """Position of the first division at which the first part takes no longer than the second."""
    low, high = 0, len(row)
    while low < high:
        middle = (low + high) // 2
        if first(row[middle][0]) <= second(row[middle][1]):
            high = middle
        else:
            low = middle + 1
    return low
