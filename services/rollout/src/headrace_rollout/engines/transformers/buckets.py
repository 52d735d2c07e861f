"""The cache's memory: buckets of rows, and how rows move from old buckets to new ones.

Shapes: R slots, H key/value heads, C capacity in tokens, D head dimension. Knows no forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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


Layer = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


@dataclass
class Bucket:
    """Rows of about one length: in each layer keys and values [R, H, C, D]; `rows[i]` lies in slot i."""

    capacity: int
    slots: int
    rows: list[int]
    layers: list[Layer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """What all slots have room for."""
        return self.slots * self.capacity

    def remove(self, gone: set[int], renamed: dict[int, int]) -> None:
        """Drops rows; the last ones fill the holes. `renamed` leads from rows to their new numbers."""
        left = sum(row not in gone for row in self.rows)
        holes = [slot for slot, row in enumerate(self.rows[:left]) if row in gone]
        movers = [slot for slot in range(left, len(self.rows)) if self.rows[slot] not in gone]
        for tensor in (each for layer in self.layers for each in layer) if holes else ():
            tensor[holes] = tensor[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        self.rows = [renamed.get(row, row) for row in self.rows[:left]]


def moved(old: Sequence[Bucket], shapes: Sequence[Shape], like: Sequence[Layer]) -> list[Bucket]:
    """New buckets with what the old ones hold; `like` has each layer's tensors with no row and no token.

    The old ones are emptied layer by layer: one layer alone is there twice meanwhile.
    """
    new = [Bucket(shape.capacity, len(shape.rows), shape.rows) for shape in shapes]
    moves = list(_moves(old, new))
    for layer, empty in enumerate(like):
        for bucket in new:
            bucket.layers.append((_room(empty[0], bucket), _room(empty[1], bucket)))
        for move in moves:
            for side in (0, 1):
                source, target = move.source.layers[layer][side], move.target.layers[layer][side]
                target[move.into, :, : move.length] = source[move.out_of, :, : move.length]
        for bucket in old:
            bucket.layers[layer] = empty
    return new


def span(slots: list[int]) -> list[int] | slice:
    """A slice where slots are consecutive: copying one is faster than gathering."""
    first = slots[0]
    return slice(first, first + len(slots)) if slots == list(range(first, first + len(slots))) else slots


@dataclass(frozen=True)
class _Move:
    source: Bucket
    target: Bucket
    out_of: list[int] | slice
    into: list[int] | slice
    length: int


def _moves(old: Sequence[Bucket], new: Sequence[Bucket]) -> Iterator[_Move]:
    for source in old:
        slot_of = {row: slot for slot, row in enumerate(source.rows)}
        for target in new:
            into = [slot for slot, row in enumerate(target.rows) if row in slot_of]
            out_of = [slot_of[target.rows[slot]] for slot in into]
            if into:
                length = min(source.capacity, target.capacity)
                yield _Move(source, target, span(out_of), span(into), length)


def _room(like: Tensor, bucket: Bucket) -> Tensor:
    # Zeros: a masked position must still be finite, 0 x inf would be NaN.
    return like.new_zeros((bucket.slots, like.shape[1], bucket.capacity, like.shape[3]))
