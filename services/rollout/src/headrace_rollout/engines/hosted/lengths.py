"""How many samples an engine's cache holds, by the lengths that they turn out to have. Knows no engine."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from headrace_schema.gpu_defaults import FEWEST_ROWS

MEASURED, ENOUGH = 1024, 64
"""Lengths of samples that are remembered, and from how many answers on they say how long one is."""


class Lengths:
    """Those of prompts and answers, newest last."""

    def __init__(self) -> None:
        self._prompts: deque[float] = deque(maxlen=MEASURED)
        self._answers: deque[int] = deque(maxlen=MEASURED)

    def asked(self, tokens: float) -> None:
        """A sample begins, with so many tokens of a prompt that its group has once."""
        self._prompts.append(tokens)

    def ended(self, tokens: int) -> None:
        """A sample has ended with an answer of so many tokens."""
        self._answers.append(tokens)

    def limit(self, most: int, cache_tokens: int) -> int:
        """How many samples run together: at most `most`, and not more than a cache of so many tokens holds, which the
        engine would take back and compute again. 0: what it holds is not known.
        """
        if not cache_tokens or len(self._answers) < ENOUGH:
            return most
        each = fmean(self._prompts) + fmean(self._answers)
        return min(most, max(FEWEST_ROWS, int(cache_tokens / max(1.0, each))))
