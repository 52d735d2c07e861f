"""Scorers that look at an answer's form, not at its truth."""

from __future__ import annotations

import re

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from headrace_reward.scorers.base import Answer
from headrace_reward.scorers.text import check_pattern


class FormatOptions(Options):
    """Options of `format`; patterns are Python regular expressions, and all that are given must hold."""

    starts_with: str | None = Field(None, description="pattern at the start, such as [0-9] for a digit")
    ends_with: str | None = Field(None, description=r"pattern at the end, such as \.")
    contains: str | None = Field(None, description="pattern anywhere")
    strip: bool = Field(True, description="remove blanks around the answer first")

    _check = field_validator("starts_with", "ends_with", "contains")(check_pattern)

    @model_validator(mode="after")
    def _some_pattern(self) -> FormatOptions:
        if self.starts_with is None and self.ends_with is None and self.contains is None:
            raise ValueError("give at least one of starts_with, ends_with, contains")
        return self


@plugin(FormatOptions)
class Format:
    """1 when the answer starts with, ends with or contains given patterns."""

    def __init__(self, options: FormatOptions) -> None:
        given = (
            ("{}", options.contains),
            (r"\A(?:{})", options.starts_with),
            (r"(?:{})\Z", options.ends_with),
        )
        self._patterns = [
            re.compile(frame.format(pattern)) for frame, pattern in given if pattern is not None
        ]
        self._strip = options.strip

    def score(self, answer: Answer) -> float:
        """1 or 0."""
        text = answer.completion.strip() if self._strip else answer.completion
        return float(all(pattern.search(text) for pattern in self._patterns))


class LengthOptions(Options):
    """Options of `length`."""

    target: NonNegativeInt = Field(description="up to this many tokens score 1")
    limit: PositiveInt = Field(description="from this many tokens on the score is 0")

    @model_validator(mode="after")
    def _ordered(self) -> LengthOptions:
        if self.limit <= self.target:
            raise ValueError(f"limit ({self.limit}) must be above target ({self.target})")
        return self


@plugin(LengthOptions)
class Length:
    """Brevity: 1 up to a target number of sampled tokens, falling in a line to 0 at a limit."""

    def __init__(self, options: LengthOptions) -> None:
        self._target, self._limit = options.target, options.limit

    def score(self, answer: Answer) -> float:
        """Between 0 and 1."""
        return min(1.0, max(0.0, (self._limit - answer.token_count) / (self._limit - self._target)))
