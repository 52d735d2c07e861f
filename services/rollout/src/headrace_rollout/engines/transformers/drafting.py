"""Drafts of tokens to come, from what a row has said before: n-gram look-up (Saxena 2023, prompt lookup decoding).

A pass over a draft yields the tokens that it guessed right, and one more. Each token is drawn from the model's own
distribution with its own uniform, whatever was drafted, and what stands behind a wrong guess is dropped: the tokens are
those that come without drafts, and for a draft of certainty that is the rule of rejection of speculative sampling
(Leviathan et al. 2023). Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NGRAM = 3
"""Tokens that must have stood before in the same order for what followed to be drafted."""
MOST_ROWS = 16
"""Rows of one pass, drafts included: beyond, a pass takes as much longer as it has more rows."""


class History:
    """One row's tokens, and where each of its n-grams was last seen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Goes on with these."""
        for token in tokens:
            # What ends in the newest token has no token behind it yet.
            if len(self._tokens) >= NGRAM:
                self._behind[tuple(self._tokens[-NGRAM:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """What followed the last NGRAM tokens when they were last seen, at most `most` tokens."""
        at = self._behind.get(tuple(self._tokens[-NGRAM:]))
        return [] if at is None or most < 1 else self._tokens[at : at + most]


def accepted(
    drawn_NT: NDArray[np.int64], drafts: Sequence[Sequence[int]], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(N,) tokens of each row that stand: those that were drafted, and the next; none behind one of `ends`."""
    counts = np.ones(len(drafts), dtype=np.int64)
    for row, draft in enumerate(drafts):
        for place, token in enumerate(draft):
            if drawn_NT[row, place] != token or token in ends:
                break
            counts[row] += 1
    return counts
