"""A data item and its canonical form, by which two items are the same."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class DataItem:
    """One question with its answer.

    `fields` are what a prompt template may use beside {question}; `metadata` travels to the scorers as JSON.
    """

    question: str
    answer: str
    fields: Mapping[str, str | int | float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The canonical question: items with the same key are one item."""
        return canonical(self.question)

    @cached_property
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
