"""How many samples an engine's cache holds, by the lengths that they turn out to have. Knows no engine."""

from __future__ import annotations

from collections import deque
from statistics import fmean

from headrace_schema.gpu_defaults import FEWEST_ROWS

MEASURED, ENOUGH = 1024, 64
"""Lengths of samples that are remembered, and from how many answers on they say how long one is."""


class Rows:
    """Samples that run together: at most `most`, and not more than the cache holds, which the engine would take back
    and compute again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prompts: deque[float] = deque(maxlen=MEASURED)
        self._answers: deque[int] = deque(maxlen=MEASURED)

    def asked(self, tokens: float) -> None:
        """A sample begins, with so many tokens of a prompt that its group has once."""
        self._prompts.append(tokens)

    def ended(self, tokens: int) -> None:
        """A sample has ended with an answer of so many tokens."""
        self._answers.append(tokens)

    def limit(self, cache_tokens: int) -> int:
        """Of samples, for a cache of so many tokens; 0: it is not known."""
        if not cache_tokens or len(self._answers) < ENOUGH:
            return self._most
        each = fmean(self._prompts) + fmean(self._answers)
        return min(self._most, max(FEWEST_ROWS, int(cache_tokens / max(1.0, each))))
