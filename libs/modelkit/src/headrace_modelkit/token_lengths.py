"""How many bytes of a decoded text each token is, by its tokenizer's table: nothing is decoded again.

Exact or empty: the lengths of a text are given only where they add up to it. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
Measure = Callable[[str], int]


def _byte_level(piece: str) -> int:
    """Each character of a byte-level piece stands for one byte."""
    return len(piece)


def _sentence_piece(piece: str) -> int:
    return 1 if BYTE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())


class _Table(dict[int, int]):
    """Bytes by id under one way of writing pieces; each id is looked up once."""

    def __init__(self, tokenizer: Any, known: dict[int, int], measure: Measure) -> None:
        super().__init__(known)
        self._tokenizer, self._measure = tokenizer, measure

    def __missing__(self, key: int) -> int:
        piece = self._tokenizer.convert_ids_to_tokens(key)
        found = self[key] = 0 if piece is None else self._measure(piece)
        return found


class TokenLengths:
    """The lengths of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        # An added token stands for its own text, a special one for none.
        known = {id: 0 if token.special else len(token.content.encode()) for id, token in added.items()}
        known |= dict.fromkeys(tokenizer.all_special_ids, 0)
        self._tables = [_Table(tokenizer, known, measure) for measure in (_byte_level, _sentence_piece)]

    def of(self, ids: Sequence[int], text: str) -> list[int]:
        """Bytes of `text` that each id is: special tokens none. Empty where the pieces do not add up to the text."""
        total = len(text.encode(errors="replace"))
        for table in self._tables:
            lengths = [table[id] for id in ids]
            if sum(lengths) == total:
                return lengths
        return _without_first_space(lengths, total)


def _without_first_space(lengths: list[int], total: int) -> list[int]:
    """SentencePiece leaves out the space that its first piece begins with."""
    first = next((index for index, length in enumerate(lengths) if length), None)
    if first is None or sum(lengths) != total + 1:
        return []
    return [length - (index == first) for index, length in enumerate(lengths)]
