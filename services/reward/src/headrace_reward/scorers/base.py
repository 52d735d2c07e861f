"""What a scorer is. Knows no process: third parties import this module and `headrace_servicekit.registry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Score = float | Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """One answer to judge."""

    prompt: str
    completion: str
    reference: str = ""
    """The expected answer; empty where there is none."""
    metadata: Mapping[str, Any] | None = None
    """The data item's further fields."""
    token_count: int = 0
    """Number of sampled tokens."""


class Scorer(Protocol):
    """Judges answers; built once per child process."""

    def score(self, answer: Answer) -> Score:
        """Returns a finite number, or finite numbers by name that are summed.

        An exception means that this answer cannot be judged; when every probe of the same
        question raises too, the scorer counts as broken.
        """
        ...


class ScorerError(Exception):
    """A scorer cannot be made; `field` is the key below `scorers[i]` that has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
