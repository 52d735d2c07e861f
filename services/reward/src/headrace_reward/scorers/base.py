"""What a scorer is, and the options every scorer declares.

Knows no registry and no process: third parties import this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

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


class Options(BaseModel):
    """Options of a scorer; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


@dataclass(frozen=True)
class ScorerType:
    """A registered kind of scorer."""

    name: str
    description: str
    options: type[Options]
    build: Callable[[Any], Scorer]
    """Takes an instance of `options`; imports heavy packages only now."""
    packages: tuple[str, ...] = ()
    """Distributions whose version changes what the scorer says."""


_SCORER = TypeVar("_SCORER", bound=type)
BUILT_IN: dict[str, ScorerType] = {}


def scorer(
    name: str, options: type[Options] = Options, packages: tuple[str, ...] = ()
) -> Callable[[_SCORER], _SCORER]:
    """Registers a class whose constructor takes its options; the docstring's first line describes it."""

    def register(cls: _SCORER) -> _SCORER:
        description = (cls.__doc__ or name).strip().splitlines()[0]
        BUILT_IN[name] = ScorerType(name, description, options, cls, packages)
        return cls

    return register
