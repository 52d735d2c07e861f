"""Scorers that judge an answer's text: against the reference, a pattern or a length."""

from __future__ import annotations

import re
from typing import Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from headrace_reward.scorers.base import Answer
from headrace_reward.scorers.numbers import last_value


def check_pattern(pattern: str | None) -> str | None:
    """Refuses what `re` cannot compile."""
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
    return pattern


class ExactOptions(Options):
    """Options of `exact`."""

    ignore_case: bool = Field(False, description="compare without regard to case")


@plugin(ExactOptions)
class Exact:
    """1 when the answer equals the reference, blanks around both removed."""

    def __init__(self, options: ExactOptions) -> None:
        self._ignore_case = options.ignore_case

    def score(self, answer: Answer) -> float:
        """1 or 0."""
        completion, reference = answer.completion.strip(), answer.reference.strip()
        if self._ignore_case:
            completion, reference = completion.casefold(), reference.casefold()
        return float(completion == reference)


@plugin()
class LastNumber:
    """1 when the last integer or decimal of the answer equals the last one of the reference."""

    def __init__(self, options: Options) -> None:
        del options

    def score(self, answer: Answer) -> float:
        """1 or 0; ValueError where the reference holds no number."""
        expected = last_value(answer.reference)
        if expected is None:
            raise ValueError(f"the reference {answer.reference!r} holds no number")
        return float(last_value(answer.completion) == expected)


class RegexOptions(Options):
    """Options of `regex`."""

    pattern: str = Field(description="Python regular expression")
    mode: Literal["search", "fullmatch"] = Field("search", description="anywhere, or the whole answer")
    ignore_case: bool = Field(False, description="match without regard to case")

    _check = field_validator("pattern")(check_pattern)


@plugin(RegexOptions)
class Regex:
    """1 when the answer matches a pattern."""

    def __init__(self, options: RegexOptions) -> None:
        pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
        self._match = pattern.fullmatch if options.mode == "fullmatch" else pattern.search

    def score(self, answer: Answer) -> float:
        """1 or 0."""
        return float(self._match(answer.completion) is not None)


class CaptureOptions(Options):
    """Options of `capture`."""

    pattern: str = Field(description="Python regular expression with one group: what the answer chooses")
    ignore_case: bool = Field(False, description="match and compare without regard to case")

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        check_pattern(pattern)
        if (count := re.compile(pattern).groups) != 1:
            raise ValueError(f"it has {count} groups; put one pair of parentheses around what is compared")
        return pattern


@plugin(CaptureOptions)
class Capture:
    """1 when the pattern's last capture in the answer equals the reference, such as the letter of a choice."""

    def __init__(self, options: CaptureOptions) -> None:
        self._pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
        self._ignore_case = options.ignore_case

    def score(self, answer: Answer) -> float:
        """1 or 0; 0 too where the pattern matches nowhere."""
        found: list[str] = self._pattern.findall(answer.completion)
        chosen, reference = (found[-1].strip() if found else None), answer.reference.strip()
        if chosen is not None and self._ignore_case:
            chosen, reference = chosen.casefold(), reference.casefold()
        return float(chosen == reference)


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
