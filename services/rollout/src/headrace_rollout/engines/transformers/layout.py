"""Which rows lie together in one tensor: few tensors, and little memory beyond what the rows' tokens need.

A bucket pads its rows to one capacity. Counts are of tokens. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PADDED, KEPT = 1.1, 1.3
"""Tokens of buckets over those needed: what a new arrangement aims at, and what an old one may come to."""
WORTH = 0.9
"""A new arrangement is made for its size alone when it takes less than this share of the old one."""
MAX_BUCKETS = 16
STEP, GROWTH = 32, 8
"""A row may grow by STEP tokens, or by one part in GROWTH of its bucket's longest row, before it is moved."""


@dataclass(frozen=True)
class Shape:
    """A bucket to be: its rows in order, and the tokens that each has room for."""

    rows: list[int]
    capacity: int

    @property
    def tokens(self) -> int:
        """What it takes."""
        return len(self.rows) * self.capacity


def arrange(lengths: Sequence[int], *, free: int, budget: int, split: bool) -> list[Shape]:
    """Buckets in which each row has room for one token more than its length.

    Below `free` tokens in all nothing is split. Where room to grow would exceed `budget`, there is none of it and
    nothing is padded: the sum of what the rows need. Without `split` there is one bucket.
    """
    lengths_N = np.asarray(lengths)
    found = _shapes(lengths_N, free, PADDED, MAX_BUCKETS if split else 1, room=True)
    if tokens_of(found) > budget:
        found = _shapes(lengths_N, 0, 1.0, len(lengths_N) if split else 1, room=False)
    return found


def tokens_of(shapes: Sequence[Shape]) -> int:
    """What all buckets take."""
    return sum(shape.tokens for shape in shapes)


def _shapes(lengths_N: NDArray[np.int64], free: int, padded: float, most: int, *, room: bool) -> list[Shape]:
    order = np.argsort(-lengths_N, kind="stable")
    descending = lengths_N[order]
    bounds = _bounds(descending, max(free, padded * descending.sum()), most)
    shapes = []
    for start, end in pairwise(bounds):
        longest = int(descending[start])
        more = max(STEP, longest // GROWTH) if room else 1
        shapes.append(Shape(sorted(order[start:end].tolist()), longest + more))
    return shapes


def _bounds(descending: NDArray[np.int64], allowed: float, most: int) -> list[int]:
    """Starts of ranges, and the end: ranges are split where that saves most until all take what is allowed."""
    bounds = [0, len(descending)]
    taken = len(descending) * int(descending[0])
    while taken > allowed and len(bounds) <= most:
        saving, at = max(_best_split(descending, *pair) for pair in pairwise(bounds))
        if not saving:
            break
        taken -= saving
        bounds = sorted([*bounds, at])
    return bounds


def _best_split(descending: NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    """(tokens saved, where) of the best place to end a range earlier."""
    if end - start < 2:
        return 0, start
    at = np.arange(start + 1, end)
    saved = (end - at) * (descending[start] - descending[start + 1 : end])
    best = int(saved.argmax())
    return int(saved[best]), int(at[best])
