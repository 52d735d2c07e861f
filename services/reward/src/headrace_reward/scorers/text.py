"""Scorers that compare text with the reference or with a pattern."""

from __future__ import annotations

import re
from typing import Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field, field_validator

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
