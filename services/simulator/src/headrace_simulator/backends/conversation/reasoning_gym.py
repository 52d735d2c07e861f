"""Puzzles of reasoning-gym (https://github.com/open-thought/reasoning-gym), by the names of its datasets.

The seed makes the puzzle. With more than one attempt a wrong answer is told to be wrong, and the model tries again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import reasoning_gym
from headrace_servicekit.problems import nearest
from headrace_servicekit.registry import Options
from pydantic import ConfigDict, Field, PositiveInt
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.options import parse, unknown


class PuzzleOptions(Options):
    """Options of a puzzle; what stands beside them are parameters of the dataset."""

    model_config = ConfigDict(extra="allow")

    attempts: PositiveInt = Field(1, description="answers that the model may give to one puzzle")
    again: str = Field("That is not right. Try again.", description="what follows a wrong answer")
    system: str = Field("", description="system message that the conversation begins with")


class Puzzle:
    """A puzzle and the model's attempts at it. Only the last attempt's score is a reward."""

    def __init__(self, name: str, options: PuzzleOptions) -> None:
        self._name, self._options = name, options
        self._parameters = dict(options.model_extra or {})
        self._begin(seed=0)

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """The question that the seed makes."""
        self._begin(seed)
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        return [*system, {"role": "user", "content": self._entry["question"]}]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Scores what stands in <answer> … </answer>, or without it the whole turn."""
        self._attempts += 1
        said = extract_answer(message["content"])
        answer = message["content"].strip() if said is None else said
        score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        right = score >= 1
        if right or self._attempts == self._options.attempts:
            return [], score, True, {"success": right}
        return [{"role": "user", "content": self._options.again}], 0.0, False, {}

    def _begin(self, seed: int) -> None:
        self._attempts = 0
        self._dataset: Any = reasoning_gym.create_dataset(
            self._name, **{**self._parameters, "seed": seed, "size": 1}
        )
        self._entry: dict[str, Any] = self._dataset[0]


def converse(name: str, options: Mapping[str, Any]) -> Puzzle:
    """Makes an environment; BackendError where the name or an option is wrong."""
    if name not in DATASETS:
        raise unknown("dataset of reasoning-gym", name, DATASETS)
    chosen = parse(PuzzleOptions, options)
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in chosen.model_extra or {}:
        if key not in fields:
            close = nearest(key, [*fields, *PuzzleOptions.model_fields])
            hint = f"; did you mean {close!r}?" if close else ""
            raise BackendError(f"options_json.{key}", f"{name} has no such parameter{hint}")
    try:
        return Puzzle(name, chosen)
    except (AssertionError, TypeError, ValueError) as error:
        raise BackendError("options_json", f"{name} refuses its parameters: {error}") from error
