"""Which reward stages score an answer, in which order, and its reward in the end. Pure: calls no instance.

An edge's threshold decides whether an answer reaches the next stage. A stage that an answer does not reach gives it no
reward, and passes it on to no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace_schema.workflow import GraphEdge, GraphSection

Key = tuple[int, int]
"""Prompt ordinal and sample index."""
Question = tuple[Key, str]
"""An answer that a stage is to score."""


@dataclass
class _Scored:
    """The rewards of one answer of a group; a stage that it does not reach has None."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


class RewardFlow:
    """The progress of answers through the reward stages of a workflow."""

    def __init__(self, graph: GraphSection, group_size: int) -> None:
        self._graph = graph
        self._stages = graph.reward_stages
        self._into = {stage: graph.into(stage) for stage in self._stages}
        self._size = group_size
        self._groups: dict[int, dict[int, _Scored]] = {}

    def enter(self, key: Key, only: str = "") -> list[Question]:
        """Adds a finished answer; returns what to ask now. With `only`, that stage alone scores it."""
        answer = self._groups.setdefault(key[0], {})[key[1]] = _Scored()
        if only:
            answer.asked.add(only)
            answer.rewards.update(dict.fromkeys(set(self._stages) - {only}))
        asked = [(key, only)] if only else []
        return asked + self._advance(key[0])

    def scored(self, key: Key, stage: str, reward: float) -> list[Question]:
        """Adds a stage's reward; returns what to ask next, of this answer and of its group's others."""
        self._groups[key[0]][key[1]].rewards[stage] = reward
        return self._advance(key[0])

    def forget(self, prompt: int) -> list[Key]:
        """Removes a group; returns its answers."""
        return [(prompt, sample) for sample in self._groups.pop(prompt, ())]

    def rewards(self, key: Key) -> dict[str, float]:
        """Rewards of the stages that have scored an answer so far."""
        found = self._groups[key[0]][key[1]].rewards
        return {stage: value for stage, value in found.items() if value is not None}

    def final(self, key: Key) -> float | None:
        """The answer's reward, once no stage is left to score it: the sum over those that count."""
        if len(self._groups[key[0]][key[1]].rewards) < len(self._stages):
            return None
        rewards = self.rewards(key)
        return sum(rewards[stage] for stage in self.counted(key))

    def counted(self, key: Key) -> list[str]:
        """Stages that have scored an answer, without those that a later one replaced."""
        rewards = self.rewards(key)
        replaced: set[str] = set()
        for stage in rewards:
            if self._graph.stages[stage].combine == "replace":
                replaced |= self._before(stage)
        return [stage for stage in rewards if stage not in replaced]

    def _before(self, stage: str) -> set[str]:
        sources = {edge.source for edge in self._into.get(stage, ())}
        return sources.union(*(self._before(source) for source in sources))

    def _advance(self, prompt: int) -> list[Question]:
        group = self._groups[prompt]
        asked: list[Question] = []
        for stage in self._stages:
            for sample, answer in group.items():
                if stage in answer.rewards or stage in answer.asked:
                    continue
                goes_on = [self._passes(edge, group, answer) for edge in self._into[stage]]
                if False in goes_on:
                    answer.rewards[stage] = None
                elif None not in goes_on:
                    answer.asked.add(stage)
                    asked.append(((prompt, sample), stage))
        return asked

    def _passes(self, edge: GraphEdge, group: dict[int, _Scored], answer: _Scored) -> bool | None:
        """Whether an edge passes an answer on; None: not known yet."""
        together = self._graph.granularity(edge) == "group"
        if together and len(group) < self._size:
            return None
        if edge.source not in self._into:  # Answers come from the rollout.
            return True
        waits_for = group.values() if together else [answer]
        if any(edge.source not in each.rewards for each in waits_for):
            return None
        reward = answer.rewards[edge.source]
        return reward is not None and (edge.at_least is None or reward >= edge.at_least)


def stage_figures(
    graph: GraphSection, rewards: Iterable[dict[str, float]]
) -> Iterator[tuple[str, int, float]]:
    """(stage, answers that it scored, their mean reward from it), of answers' rewards by stage."""
    listed = list(rewards)
    for stage in graph.reward_stages:
        found = [each[stage] for each in listed if stage in each]
        if found:
            yield stage, len(found), sum(found) / len(found)
