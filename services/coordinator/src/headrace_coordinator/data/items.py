"""A data item and its canonical form, by which two items are the same."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_schema.images import Kind, kind_of, marks_in
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.trajectories import keys_of


@dataclass(frozen=True)
class DataItem:
    """One question with its answer.

    `fields` are what a prompt template may use beside {question}; `metadata` travels to the scorers as JSON.
    `messages` are a conversation, whose last turn is the question; none where that is plain text. They have role,
    content (maybe None beside other keys), and whatever else chat templates read. `arguments` are what the template
    is given beside them, such as tools.
    `images` are files, in the order of their marks in the texts; without marks they stand before the question.
    `id` tells the item apart from others; without one, what the prompt shows of it does.
    """

    question: str
    answer: str
    fields: Mapping[str, str | int | float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    id: str = ""
    images: tuple[bytes, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The id, else the canonical question and what tells its images apart."""
        if self.id:
            return f"id {self.id}"
        return "\n".join([canonical(self.question), *map(digest_bytes, self.images)])

    @property
    def kinds(self) -> list[Kind]:
        """What its images are."""
        return list(map(kind_of, self.images))

    @property
    def marks(self) -> list[Kind]:
        """Places for images in its texts, in order."""
        texts = [turn["content"] or "" for turn in self.messages] or [self.question]
        return [kind for text in texts for kind in marks_in(text, self.kinds)]

    def told_apart(self, shown: Iterable[str]) -> str:
        """The key, and what a prompt shows beside the question: earlier turns and these fields."""
        if self.id:
            return self.key
        turns = [
            f"{turn['role']}: {canonical(turn['content'] or '')}{keys_of(turn)}"
            for turn in self.messages[:-1]
        ]
        fields = [f"{name}={canonical(str(self.fields[name]))}" for name in shown]
        given = [json.dumps(self.arguments, sort_keys=True)] if self.arguments else []
        return "\n".join([self.key, *turns, *fields, *given])

    def told_apart_with_answers(self) -> str:
        """An id of everything that the item says, its answers too."""
        said = [
            self.question,
            self.answer,
            self.metadata,
            [dict(turn) for turn in self.messages],
            self.arguments,
        ]
        return digest_bytes(json.dumps([*said, *map(digest_bytes, self.images)], sort_keys=True).encode())

    @property
    def metadata_json(self) -> str:
        """`metadata` as the scorers of each of its answers get it; empty without any."""
        return json.dumps(self.metadata) if self.metadata else ""

    def names(self) -> set[str]:
        """Everything `data.exclude` may call this item by, without spaces: its question, its expression."""
        expression = self.fields.get("expression")
        return {squeezed(self.question)} | ({squeezed(str(expression))} if expression is not None else set())


def canonical(text: str) -> str:
    """Unicode NFC with every run of whitespace as one space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def squeezed(text: str) -> str:
    """Canonical text without any space, so that "4+4" names the expression "4 + 4"."""
    return canonical(text).replace(" ", "")
