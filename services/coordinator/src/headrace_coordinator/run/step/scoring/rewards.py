"""Carries a step's answers through a workflow with several reward stages.

`domain/ledger/reward_flow.py` says where each goes. Knows no reward instance: it asks through `Scoring`, and hands one
result for each answer on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import isfinite

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.domain.ledger.reward_flow import Key, Question, RewardFlow
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.state import Batch

Ask = Callable[[reward.ScoreItem], None]
Deliver = Callable[[list[reward.ScoreResult]], None]


class ScoreStages:
    """The reward stages of one step attempt. `ask` gives a question to the reward instances."""

    def __init__(self, context: RunContext, batch: Batch, ask: Ask, deliver: Deliver) -> None:
        spec = context.spec
        self._flow = RewardFlow(spec.graph, spec.algorithm.group_size)
        self._main = spec.main_stage
        self._ends_truncated = spec.reward.truncated_reward is not None
        self._open = context.state.ledger.index.open
        self._batch = batch
        self._ask = ask
        self._deliver = deliver
        self._items: dict[Key, reward.ScoreItem] = {}
        self._parts: dict[Key, dict[str, float]] = {}
        self._on_the_way: dict[int, list[Key]] = defaultdict(list)

    def put(self, item: reward.ScoreItem) -> None:
        """A finished answer begins its way."""
        key = _key(item)
        self._items[key], self._parts[key] = item, {}
        self._on_the_way[key[0]].append(key)
        cut = self._ends_truncated and item.finish_reason == common.FINISH_REASON_LENGTH
        self._put(self._flow.enter(key, self._main if cut else ""))

    def take(self, results: Iterable[reward.ScoreResult]) -> None:
        """Results of single stages; answers that are through go on with the reward that theirs add up to."""
        through: list[reward.ScoreResult] = []
        for result in results:
            key, stage = _key(result), result.stage or self._main
            prefix = f"{result.stage}/" if result.stage else ""
            self._parts[key].update({prefix + part: score for part, score in result.parts.items()})
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN or not isfinite(result.reward):
                result.detail = f"stage {stage}: {result.detail}"
                through.append(result)  # It ends the group, of which nothing more is asked.
            else:
                self._put(self._flow.scored(key, stage, result.reward))
                through += self._through(key[0])
        if through:
            self._deliver(through)

    def _put(self, questions: Iterable[Question]) -> None:
        for key, stage in questions:
            if key[0] in self._open:
                item = reward.ScoreItem(stage="" if stage == self._main else stage)
                item.MergeFrom(self._items[key])
                self._ask(item)

    def _through(self, prompt: int) -> Iterator[reward.ScoreResult]:
        """Results of a group's answers that no stage will see any more, each once."""
        staying: list[Key] = []
        for key in self._on_the_way[prompt]:
            value = self._flow.final(key)
            if value is None:
                staying.append(key)
                continue
            item = self._items.pop(key)
            self._batch.stage_rewards[key] = self._flow.rewards(key)
            yield reward.ScoreResult(
                sample=item.sample,
                attempt=item.attempt,
                status=reward.SCORE_STATUS_OK,
                reward=value,
                parts=self._parts[key],
            )
        self._on_the_way[prompt] = staying


def _key(message: reward.ScoreItem | reward.ScoreResult) -> Key:
    return message.sample.prompt_ordinal, message.sample.sample_index
