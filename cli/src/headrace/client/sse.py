"""Server-sent events as lines to messages (WHATWG HTML, section 9.2). Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One dispatched message; `id` is the last id seen on the stream."""

    id: str
    event: str
    data: str


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """Parses the lines of a stream; comments are skipped, a message cut off by the end is dropped.

    >>> list(messages(["id: 7", "event: step", "data: {}", ""]))
    [Message(id='7', event='step', data='{}')]
    """
    last_id, event = "", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield Message(last_id, event, "\n".join(data))
            event, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            last_id = value
        elif name == "event":
            event = value
        elif name == "data":
            data.append(value)
