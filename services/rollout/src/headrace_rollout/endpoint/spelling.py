"""Which bytes of a turn's text each of its ids is. Knows no session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CUT = "\ufffd"
"""What a decoder shows of a character whose last bytes are missing."""


class Decodes(Protocol):
    """A tokenizer's way back; `lengths` of ids and their text, where it has that, says how many bytes each id is."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class Spelling:
    """Ids of one turn as they come, and their bytes once their characters are whole; these join to the text."""

    def __init__(self, codec: Decodes) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = self._read = 0
        """Ids before `read` have their bytes; decoding begins at `shown`, as text may depend on the token before."""

    def new(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of the next ids, as far as their characters are whole."""
        found: list[bytes] = []
        for id in ids:
            self._ids.append(id)
            text = self._text()
            if text and not text.endswith(CUT):
                found += self._given(text)
        return found

    def rest(self) -> list[bytes]:
        """The bytes of the ids that are left as the turn ends."""
        return self._given(self._text()) if self._read < len(self._ids) else []

    def _text(self) -> str:
        """What is read of the ids that have no bytes yet."""
        before = self._codec.decode(self._ids[self._shown : self._read])
        return self._codec.decode(self._ids[self._shown :])[len(before) :]

    def _given(self, text: str) -> list[bytes]:
        ids, data = self._ids[self._read :], text.encode(errors="replace")
        self._shown, self._read = self._read, len(self._ids)
        parts = getattr(self._codec, "lengths", None) if len(ids) > 1 and data else None
        lengths: list[int] = parts(ids, text) if parts else []
        if not lengths:  # or it is not known which id is which part: the last one made them a text
            lengths = [0] * (len(ids) - 1) + [len(data)]
        ends = [sum(lengths[: place + 1]) for place in range(len(ids))]
        return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]
