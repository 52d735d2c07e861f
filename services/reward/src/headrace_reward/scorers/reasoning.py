"""The datasets of reasoning-gym judge their own items (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from headrace_servicekit.registry import Options, plugin
from pydantic import Field

from headrace_reward.scorers.base import Answer, ScorerError
from headrace_reward.scorers.numbers import last_number


class ReasoningGymOptions(Options):
    """Options of `reasoning_gym`."""

    dataset: str | None = Field(None, description="dataset name; default: the item's own")
    config: dict[str, Any] = Field(default_factory=dict, description="settings of the dataset that judges")
    extract: Literal["none", "last_line", "last_number"] = Field(
        "none", description="the part of the answer that is judged"
    )


@plugin(ReasoningGymOptions, packages=("reasoning-gym",))
class ReasoningGym:
    """The score_answer of the reasoning-gym dataset that made the item."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            fix = "reasoning_gym needs its extra: pip install 'headrace-reward[reasoning-gym]'"
            raise ScorerError("name", fix) from error
        self._library, self._known = reasoning_gym, DATASETS
        self._options = options
        self._datasets: dict[str, Any] = {}
        if options.dataset is not None:
            if options.dataset not in DATASETS:
                raise ScorerError("options.dataset", self._unknown(options.dataset))
            self._dataset(options.dataset)

    def score(self, answer: Answer) -> float:
        """What the dataset says, usually between 0 and 1; ValueError where the item names no dataset.

        The metadata hold the item (`item`, or the fields beside it) and name the dataset as `dataset`,
        or as `source_dataset`, where reasoning-gym puts it.
        """
        metadata = answer.metadata or {}
        item = _item(metadata, answer)
        name = self._options.dataset or metadata.get("dataset") or item["metadata"].get("source_dataset")
        if not isinstance(name, str) or name not in self._known:
            raise ValueError(f"metadata.source_dataset: {self._unknown(name)}")
        return float(self._dataset(name).score_answer(answer=self._extract(answer.completion), entry=item))

    def _dataset(self, name: str) -> Any:
        if name not in self._datasets:
            self._datasets[name] = self._library.create_dataset(name, **self._options.config)
        return self._datasets[name]

    def _extract(self, completion: str) -> str | None:
        if self._options.extract == "last_number":
            return last_number(completion)
        if self._options.extract == "last_line":
            return completion.strip().split("\n")[-1].strip()
        return completion

    def _unknown(self, name: object) -> str:
        near = difflib.get_close_matches(str(name), self._known, n=1)
        return f"reasoning-gym has no dataset {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _item(metadata: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """The item as reasoning-gym made it: question, answer, metadata."""
    given = metadata.get("item", metadata)
    inner = given.get("metadata", given)
    return {
        "question": given.get("question", answer.prompt),
        "answer": answer.reference,
        "metadata": dict(inner),
    }
