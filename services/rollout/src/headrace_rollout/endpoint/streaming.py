"""Answers as they are made: new ids of a turn become pieces of text, of which none is taken back.

Knows no session and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_rollout.endpoint.answers import Answer, Told

MARKS = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜DSML｜"),
    "minimax": ("<minimax:tool_call>",),
    "pythonic": ("[", "<function_calls>", "<|tool_call_start|>", "<|python_start|>"),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("{", "<|python_tag|>"),
    "json": ("{", "[", "```"),
}
"""What calls of tools begin with, by the form of `tool_calls`."""
CUT = "\ufffd"
"""What a decoder shows of a character whose last bytes are missing."""
Tokens = tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Piece:
    """What is new of a choice: its text and (bytes, log-prob) of its tokens; with `answer`, the rest of it.

    `first` is the number of the request's first choice.
    """

    first: int
    choice: int
    text: str
    tokens: Tokens
    answer: Answer | None = None


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


class Pieces:
    """One answer on its way. Text from the first of `marks` on is kept until the end: it may be a call of a tool."""

    def __init__(self, codec: Decodes, marks: Sequence[str], *, log_probs: bool) -> None:
        self._marks, self._log_probs = marks, log_probs
        self._spelling = Spelling(codec)
        self._spelled: list[bytes] = []
        self._text, self._sent = "", 0
        self._values: list[float] = []
        self._told = 0

    def new(self, ids: Sequence[int], log_probs: Sequence[float]) -> tuple[str, Tokens]:
        """What may be told of the text now, and the tokens since the last time; nothing while there is no text."""
        found = self._spelling.new(ids)
        self._spelled += found
        self._values += log_probs
        self._text += b"".join(found).decode()
        text = self._until(self._safe())
        return (text, self._tokens()) if text else ("", ())

    def rest(self, answer: Answer) -> tuple[str, Tokens]:
        """What was not told of an answer that has ended."""
        sent = self._text[: self._sent]
        # Blanks before a call were told, and are no part of the content beside it.
        self._text = answer.content if answer.content.startswith(sent) else sent
        return self._until(len(self._text)), answer.tokens[self._told :] if self._log_probs else ()

    def _until(self, end: int) -> str:
        text = self._text[self._sent : end]
        self._sent += len(text)
        return text

    def _tokens(self) -> Tokens:
        if not self._log_probs:
            return ()
        told, self._told = self._told, len(self._spelled)
        return tuple(zip(self._spelled[told:], self._values[told : self._told], strict=True))

    def _safe(self) -> int:
        """Where text may be told to: a mark does not begin before it."""
        ends = [len(self._text)]
        for mark in self._marks:
            if (found := self._text.find(mark)) >= 0:
                ends.append(found)
            else:
                most = min(len(mark) - 1, len(self._text))
                ends += [
                    len(self._text) - size for size in range(1, most + 1) if self._text.endswith(mark[:size])
                ]
        return min(ends)


async def pieces_of(
    ask: Callable[[Told], Awaitable[Sequence[Answer]]], texts: Sequence[Pieces]
) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices as they come, each one's end with its answer. Raises what `ask` does.

    Closed early, it ends what was asked for.
    """
    waiting: asyncio.Queue[tuple[int, int, Sequence[int], Sequence[float]] | None] = asyncio.Queue()

    def told(first: int, choice: int, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        waiting.put_nowait((first, choice, ids, log_probs))

    asking = asyncio.ensure_future(ask(told))
    asking.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (item := await waiting.get()) is not None:
            first, choice, ids, log_probs = item
            text, tokens = texts[choice].new(ids, log_probs)
            if text:
                yield Piece(first, choice, text, tokens)
        for choice, answer in enumerate(asking.result()):
            yield Piece(answer.number - choice, choice, *texts[choice].rest(answer), answer)
    finally:
        asking.cancel()
