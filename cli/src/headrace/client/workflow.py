"""A workflow built in Python: the same graph that a spec's `workflow` and `reward.stages` declare.

Edges are typed, so that a type checker refuses one that does not fit. The coordinator checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Answers:
    """What the rollout makes."""

    stage: str


@dataclass(frozen=True)
class Scored:
    """Answers with the reward of a stage."""

    stage: str


class Workflow:
    """A graph of stages, from `answers` to `learn`.

    >>> flow = Workflow()
    >>> scored = flow.score(flow.answers)
    >>> judged = flow.score(scored, name="judge", scorers=[{"name": "format"}], at_least=1.0)
    >>> flow.learn(judged)
    >>> spec = flow.into({"reward": {"scorers": [{"name": "exact"}]}})
    >>> spec["reward"]["stages"], spec["workflow"]["edges"][1]
    ({'judge': [{'name': 'format'}]}, {'source': 'score', 'target': 'judge', 'at_least': 1.0})
    """

    def __init__(self) -> None:
        self.answers = Answers("generate")
        self._stages: dict[str, dict[str, Any]] = {"generate": {"service": "rollout"}}
        self._edges: list[dict[str, Any]] = []
        self._scorers: dict[str, list[dict[str, Any]]] = {}

    def score(
        self,
        *sources: Answers | Scored,
        name: str = "score",
        scorers: Sequence[Mapping[str, Any]] = (),
        combine: Literal["add", "replace"] = "add",
        granularity: Literal["trajectory", "group"] = "trajectory",
        at_least: float | None = None,
    ) -> Scored:
        """A reward stage behind `sources`; one stage has no scorers here and takes the spec's `reward.scorers`.

        `at_least`: of answers that a reward stage scored, only those with at least this reward of it go on.
        """
        self._stages[name] = {"service": "reward"} | ({"combine": combine} if combine != "add" else {})
        if scorers:
            self._scorers[name] = [dict(scorer) for scorer in scorers]
        for source in sources:
            edge: dict[str, Any] = {"source": source.stage, "target": name}
            if granularity != "trajectory":
                edge["granularity"] = granularity
            if at_least is not None and isinstance(source, Scored):
                edge["at_least"] = at_least
            self._edges.append(edge)
        return Scored(name)

    def learn(self, *sources: Scored, granularity: Literal["group", "batch"] = "group") -> None:
        """The trainer learns from the groups of `sources`: as they are complete, or with the whole batch."""
        self._stages["learn"] = {"service": "trainer"}
        self._edges += [
            {"source": source.stage, "target": "learn", "granularity": granularity} for source in sources
        ]

    def into(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a run spec with this workflow and its scorers."""
        made = deepcopy(dict(spec))
        made["workflow"] = {"stages": deepcopy(self._stages), "edges": deepcopy(self._edges)}
        if self._scorers:
            made["reward"] = {**made.get("reward", {}), "stages": deepcopy(self._scorers)}
        return made
