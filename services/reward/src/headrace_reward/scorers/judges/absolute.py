"""A score for each answer by itself, from a judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from typing import Literal

from headrace_servicekit.registry import plugin
from pydantic import Field, field_validator, model_validator

from headrace_reward.scorers.base import BLANK, Answer
from headrace_reward.scorers.judges.verdicts import (
    Judgements,
    Unreadable,
    VerdictOptions,
    fill,
    of_answer,
    read_json,
    schema,
    unknown_places,
)

_PLACES = ("question", "reference", "messages", "completion", "low", "high")
PROMPT = """The question:
{mark}
{question}
{mark}

A reference answer, where there is one:
{mark}
{reference}
{mark}

The answer to judge:
{mark}
{completion}
{mark}

How good is the answer, from {low} (worst) to {high} (best)?"""
_FORM = 'Reply with one JSON object alone: {"reason": "one sentence", "score": a number from {low} to {high}}'
_PROBE = Answer(prompt="What is 1 + 1?", completion="2", reference="2")


class JudgeOptions(VerdictOptions):
    """Options of `judge`."""

    prompt: str = Field(
        PROMPT, description="what the judge reads; {completion} and others stand for the answer's"
    )
    low: float = Field(0.0, description="the judge's worst score, which is worth 0")
    high: float = Field(10.0, description="the judge's best score, which is worth 1")
    verdict: Literal["schema", "json", "regex"] = Field(
        "schema", description="reply: JSON by response_format, JSON by request alone, or text with a pattern"
    )
    pattern: str = Field("", description="verdict regex: pattern with one group, the score")

    @field_validator("prompt")
    @classmethod
    def _known_places(cls, prompt: str) -> str:
        if unknown := unknown_places(prompt, _PLACES):
            raise ValueError(
                f"{{{unknown[0]}}} stands for nothing; there are {', '.join((*_PLACES, 'mark'))}"
            )
        if "{completion}" not in prompt and "{messages}" not in prompt:
            raise ValueError("it shows no answer; write {completion}, or {messages} of a conversation")
        return prompt

    @model_validator(mode="after")
    def _fits(self) -> JudgeOptions:
        if self.high <= self.low:
            raise ValueError(f"high: {self.high:g} is not above low = {self.low:g}; raise it")
        if (self.verdict == "regex") != bool(self.pattern):
            raise ValueError("pattern: it goes with verdict: regex; give both or neither")
        if self.pattern:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"pattern: not a regular expression: {error}") from error
            if groups != 1:
                raise ValueError(
                    f"pattern: it has {groups} groups; put one pair of parentheses around the score"
                )
        return self


@plugin(JudgeOptions)
class Judge:
    """Between 0 and 1: the score that a model gives an answer, behind an OpenAI-compatible endpoint."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._judgements = Judgements(options)
        range_ = {"low": f"{options.low:g}", "high": f"{options.high:g}"}
        self._range = range_
        self._form = fill(_FORM, range_) if options.verdict != "regex" else f"Its form is {options.pattern}"
        self._extra = schema("verdict", {"score": {"type": "number"}}) if options.verdict == "schema" else {}
        self.longest_s = options.deadline_s

    async def score(self, answer: Answer) -> dict[str, float] | None:
        """The scaled score and the judge's own, `verdict`; None where it abstains."""
        if answer == BLANK:  # The scorer is being tried: is the judge there, and does it take what is sent?
            answer = _PROBE
        shown = {**of_answer(answer), "completion": answer.completion, **self._range}
        prompt = fill(self._options.prompt, shown)
        if self._options.verdict != "regex":
            prompt = f"{prompt}\n\n{self._form}"
        verdict = await self._judgements.of(prompt, self._extra, self._form, self._read)
        if verdict is None:
            return None
        low, high = self._options.low, self._options.high
        return {"score": (verdict - low) / (high - low), "verdict": verdict}

    def _read(self, reply: str) -> float:
        """The judge's score; raises Unreadable."""
        if self._options.verdict == "regex":
            found: set[float] = set()
            for text in re.findall(self._options.pattern, reply):
                try:
                    found.add(float(text))
                except ValueError as error:
                    raise Unreadable(f"{text!r} is no number") from error
            # A judge that quotes what an answer claims of itself has said two.
            if len(found) != 1:
                raise Unreadable(f"it holds {len(found)} different scores")
            (value,) = found
        else:
            value = read_json(reply, "score")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Unreadable("its score is no number")
        if not self._options.low <= value <= self._options.high:
            raise Unreadable(f"its score is not between {self._options.low:g} and {self._options.high:g}")
        return float(value)
