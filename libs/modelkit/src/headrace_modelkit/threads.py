"""How many threads torch computes with: as many as a lease has cores, or one, whichever this work is faster with.

Small matrix products are slower in several threads than in one: starting and joining these takes longer than what they
save. Where that ends depends on the machine and on what else it does, so it is measured on the work itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

FEWEST, MOST = 2, 6
"""Comparisons of the two numbers before one is chosen: fewest, where they agree, and most."""
CLEAR = 2.0
"""Ratio of their median to their spread from which they count as agreeing."""
GAIN = 0.03
"""What several threads must save."""
LONG_S, PLAIN = 0.05, 0.2
"""Pieces that take so long agree at once when one takes so much longer than the other (a logarithm): chance moves
seconds by less, and each such piece in one thread costs what it was to save."""
KEPT = 400
"""Pieces of work after which it is measured again."""
LEAST_S = 1e-7


class Threads:
    """The number of threads of one thread of this process that computes. Use it from that thread alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.fixed = False
        """All cores of the lease whatever they bring: those beside a GPU."""
        self.single = False
        """One thread whatever the lease has: several divide sums where their number says (`invariant`)."""
        self._most = 1
        self._choices: dict[tuple[int, str, int], Choice] = {}
        """By cores, kind and size: a step's devices come and go, and what was measured holds when they come back."""

    def lease(self, most: int) -> None:
        """Sets the number of cores to compute on."""
        self._most = 1 if self.single else most
        torch.set_num_threads(self._most)

    @contextmanager
    def work(self, kind: str, size: int) -> Iterator[None]:
        """Around one piece of work, which gets the better number of threads.

        `size`: what its seconds rise with, rows or tokens. Pieces of a kind share a choice where their sizes have
        the same power of two.
        """
        if self.fixed or self._most == 1:
            yield
            return
        choice = self._choices.setdefault((self._most, kind, max(1, size).bit_length()), Choice())
        several = choice.several
        torch.set_num_threads(self._most if several else 1)
        began = self._clock()
        try:
            yield
            choice.took(self._clock() - began, max(1, size))
        finally:
            torch.set_num_threads(self._most)


class Choice:
    """Several threads or one, by like pieces of work in the order several, one, one, several: no drift favours any."""

    def __init__(self) -> None:
        self._chosen: bool | None = None
        self._left = 0
        self._pieces = -1  # The first piece is what is done once.
        self._last_s, self._last_long = 0.0, False
        self._ratios: list[float] = []

    @property
    def several(self) -> bool:
        """Whether the next piece is computed with several threads."""
        if self._chosen is not None:
            return self._chosen
        return self._pieces % 4 in (0, 3) or self._pieces < 0

    def took(self, seconds: float, size: int = 1) -> None:
        """The piece, of that size, took so long."""
        if self._chosen is not None:
            self._left -= 1
            if self._left <= 0:
                self._chosen, self._pieces, self._ratios = None, 0, []
            return
        if self._pieces < 0:
            self._pieces = 0
            return
        several, each_s, long = self.several, max(LEAST_S, seconds / size), seconds >= LONG_S
        if self._pieces % 2 == 1:
            ratio = math.log(each_s / self._last_s)
            self._ratios.append(ratio if several else -ratio)
            plain = long and self._last_long and abs(ratio) > PLAIN
            if plain or (self._pieces % 4 == 3 and self._agree()):
                self._chosen, self._left = median(self._ratios) < math.log1p(-GAIN), KEPT
        self._last_s, self._last_long = each_s, long
        self._pieces += 1

    def _agree(self) -> bool:
        middle, spread = median(self._ratios), max(self._ratios) - min(self._ratios)
        return len(self._ratios) >= MOST or (len(self._ratios) >= FEWEST and abs(middle) > CLEAR * spread)
