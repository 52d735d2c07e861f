"""A score for each answer of a group, from how a judge compares them: by ranking all, or two at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from headrace_servicekit.registry import plugin
from pydantic import Field, PositiveInt, field_validator

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

_VERDICT = TypeVar("_VERDICT")
_PLACES = ("question", "reference", "messages", "answers")
PROMPT = """The question:
{mark}
{question}
{mark}

A reference answer, where there is one:
{mark}
{reference}
{mark}

{answers}

{task}"""
_TASKS = {
    "ranking": "Rank the {count} answers from the best to the worst.",
    "pairs": "Which of the two answers is better?",
}
_FORMS = {
    "ranking": 'Reply with one JSON object alone: {"reason": "one sentence", "ranking": [all {count} numbers of '
    "answers, the best first]}",
    "pairs": 'Reply with one JSON object alone: {"reason": "one sentence", "better": 1, 2, or 0 where both are equally '
    "good}",
}
_SCHEMAS = {
    "ranking": schema("ranking", {"ranking": {"type": "array", "items": {"type": "integer"}}}),
    "pairs": schema("comparison", {"better": {"type": "integer", "enum": [0, 1, 2]}}),
}
_PROBE = ("What is 1 + 1?", ["2", "3"])


class JudgeGroupOptions(VerdictOptions):
    """Options of `judge_group`."""

    by: Literal["ranking", "pairs"] = Field(
        "ranking", description="the judge ranks all answers at once, or compares two at a time"
    )
    prompt: str = Field(
        PROMPT, description="what the judge reads; {answers} and {task} stand for the group's"
    )
    rounds: PositiveInt = Field(
        2,
        le=16,
        description="orders in which the same answers are shown; every second one is the reverse of the last",
    )
    opponents: PositiveInt = Field(4, description="pairs: others that an answer is compared with")
    seed: int = Field(0, description="of the orders and opponents, which follow from it and the texts")
    verdict: Literal["schema", "json"] = Field(
        "schema", description="reply: JSON by response_format, or by request alone"
    )

    @field_validator("prompt")
    @classmethod
    def _known_places(cls, prompt: str) -> str:
        if unknown := unknown_places(prompt, (*_PLACES, "task")):
            known = ", ".join((*_PLACES, "task", "mark"))
            raise ValueError(f"{{{unknown[0]}}} stands for nothing; there are {known}")
        if "{answers}" not in prompt:
            raise ValueError("it shows no answers; write {answers}")
        return prompt


@plugin(JudgeGroupOptions)
class JudgeGroup:
    """Between 0 and 1: the place of an answer among those to the same prompt, as a model compares them."""

    needs_group = True

    def __init__(self, options: JudgeGroupOptions) -> None:
        self._options = options
        self._judgements = Judgements(options)
        self.longest_s = options.deadline_s

    async def score(self, answer: Answer) -> float | None:
        """0 for the worst, 1 for the best, ties share; 0.5 where all are the same text. None where it abstains."""
        if answer == BLANK:  # The scorer is being tried: is the judge there, and does it take what is sent?
            question, texts = _PROBE
            answer = Answer(prompt=question, completion=texts[0], group=texts)
        if not answer.group:
            raise LookupError(
                "it compares the answers of a group, which only stages that wait for groups have (reward.give: "
                "[group], docs/rewards.md#judges)"
            )
        others = sorted({*answer.group} - {answer.completion})
        if not others:
            return 0.5
        if self._options.by == "ranking":
            return await self._ranked(answer, sorted({*others, answer.completion}))
        return await self._compared(answer, others)

    async def _ranked(self, answer: Answer, texts: Sequence[str]) -> float | None:
        """The mean place over rounds that show the texts in seeded orders."""
        found = await asyncio.gather(*(self._ranking(answer, order) for order in self._orders(answer, texts)))
        places = [1 - ranking.index(answer.completion) / (len(texts) - 1) for ranking in found if ranking]
        return sum(places) / len(places) if places else None

    async def _ranking(self, answer: Answer, order: Sequence[str]) -> list[str] | None:
        def read(reply: str) -> list[str]:
            ranking = read_json(reply, "ranking")
            numbers = list(range(1, len(order) + 1))
            if not isinstance(ranking, list) or any(type(each) is not int for each in ranking):
                raise Unreadable("its ranking is no list of numbers")
            if sorted(ranking) != numbers:
                raise Unreadable(f"its ranking does not name each of 1 to {len(order)} once")
            return [order[each - 1] for each in ranking]

        return await self._ask("ranking", answer, order, read)

    async def _compared(self, answer: Answer, others: Sequence[str]) -> float | None:
        """The share of comparisons that the answer wins; a draw is half a win."""
        mine = answer.completion
        pairs = [sorted((mine, other)) for other in self._opponents(answer, others)]
        orders = [order for pair in pairs for order in self._orders(answer, pair)]
        found = await asyncio.gather(*(self._points(answer, order) for order in orders))
        points = [each for each in found if each is not None]
        return sum(points) / len(points) if points else None

    async def _points(self, answer: Answer, order: Sequence[str]) -> float | None:
        """1 where the answer is the better one of two, 0.5 for a draw."""

        def read(reply: str) -> int:
            better = read_json(reply, "better")
            if type(better) is not int or better not in (0, 1, 2):
                raise Unreadable("its better is none of 0, 1, 2")
            return better

        better = await self._ask("pairs", answer, order, read)
        if better is None:
            return None
        return float(order[better - 1] == answer.completion) if better else 0.5

    async def _ask(
        self, by: str, answer: Answer, order: Sequence[str], read: Callable[[str], _VERDICT]
    ) -> _VERDICT | None:
        count = {"count": str(len(order))}
        blocks = [
            f"Answer {place}:\n{{mark}}\n{{answer_{place}}}\n{{mark}}" for place in range(1, len(order) + 1)
        ]
        template = self._options.prompt.replace("{answers}", "\n\n".join(blocks))
        texts = {f"answer_{place}": text for place, text in enumerate(order, 1)}
        form = fill(_FORMS[by], count)
        prompt = fill(template, {**of_answer(answer), **texts, "task": fill(_TASKS[by], count)})
        extra = _SCHEMAS[by] if self._options.verdict == "schema" else {}
        return await self._judgements.of(f"{prompt}\n\n{form}", extra, form, read)

    def _orders(self, answer: Answer, texts: Sequence[str]) -> list[list[str]]:
        """As many orders as there are rounds: a judge that prefers a place gives it to each once in two rounds."""
        draw, orders = self._random(answer, texts), list[list[str]]()
        for number in range(self._options.rounds):
            orders.append(orders[-1][::-1] if number % 2 else draw.sample(texts, len(texts)))
        return orders

    def _opponents(self, answer: Answer, others: Sequence[str]) -> list[str]:
        """Neighbours in a circle of all texts, so that whom an answer meets, meets it too and is asked about once."""
        if self._options.opponents >= len(others):
            return list(others)
        circle = sorted((*others, answer.completion))
        circle = self._random(answer, circle).sample(circle, len(circle))
        place, reach = circle.index(answer.completion), -(-self._options.opponents // 2)
        near = [circle[(place + step) % len(circle)] for step in range(-reach, reach + 1) if step]
        return sorted({*near})

    def _random(self, answer: Answer, texts: Sequence[str]) -> random.Random:
        told = json.dumps([self._options.seed, answer.prompt, *texts]).encode()
        return random.Random(hashlib.blake2b(told, digest_size=8).digest())
