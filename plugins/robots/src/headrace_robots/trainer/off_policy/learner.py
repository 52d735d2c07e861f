"""Learning off policy, on the leader: a step's episodes go to the ranks' stores, and the updates that are due follow.

Knows no wire, no model and no store; the step's rules are `step`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

import msgspec
import numpy as np
import torch
from headrace_schema.openings import TrainerConfig
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.intake import admitted
from headrace_trainer.learning.passes import EpisodeRounds, PassesLearner
from headrace_trainer.learning.samples import (
    EpisodeData,
    EpisodeKey,
    EpisodeMember,
    Group,
    GroupRecord,
    LentPictures,
    packed,
)
from typing_extensions import override

from headrace_robots.trainer.algorithms.advantages import with_scores
from headrace_robots.trainer.learner import data_of, keyed, record_of
from headrace_robots.trainer.off_policy.algorithm import OffPolicyAlgorithm

TOGETHER = 64
"""Updates of a round: between two rounds leases are looked at."""


class OffPolicyLearner(PassesLearner[range, int]):
    """Gives episodes to ranks in turn, and says how many updates each step makes."""

    _rounds: EpisodeRounds

    def __init__(self, config: TrainerConfig, algorithm: OffPolicyAlgorithm, rounds: EpisodeRounds) -> None:
        super().__init__(config, algorithm, rounds)  # type: ignore[arg-type]
        self._algorithm = algorithm
        self._chunks: Counter[int] = Counter()
        """Of the step's episodes, by the replica that stores them."""

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups. Raises Refusal CONFLICT."""
        state, fresh = admitted(state, groups, self._config.algorithm.max_staleness)
        data = [
            self._data(key, member) for group in fresh for key, member in keyed(group) if not member.masked
        ]
        if data:
            self._rounds.read(data, [self._owner(each) for each in data])
        for group in fresh:
            state = steps.learned(state, record_of(state, group))
        return state

    def reset(self) -> None:
        """Drops the attempt's episodes."""
        if self._chunks:
            self._rounds.end_episodes(learned=False)
            self._chunks.clear()

    def _owner(self, data: EpisodeData) -> int:
        """The replica that gets the fewest chunks of the step."""
        replica = min(range(self._rounds.replicas), key=self._chunks.__getitem__)
        self._chunks[replica] += data.valid_TC.shape[0]
        return replica

    def _data(self, key: EpisodeKey, member: EpisodeMember) -> EpisodeData:
        data, episode = data_of(key, member), member.episode
        earned_BTC = with_scores(
            torch.from_numpy(episode.rewards_TC)[None],
            torch.from_numpy(episode.valid_TC)[None],
            torch.tensor([member.reward], dtype=torch.float32),
            getattr(self._algorithm.options, "score", "none"),  # dagger learns from no reward
        )
        outcome = {
            "rewards": np.where(episode.valid_TC, earned_BTC[0].numpy(), 0).sum(1).astype(np.float32),
            "ended": np.array([episode.terminated, episode.success]),
            "version": np.array([member.policy_number]),
        }
        if episode.intervened_TC is not None:
            outcome["executed"], outcome["intervened"] = episode.executed_TCA, episode.intervened_TC
            outcome["author"] = np.frombuffer(episode.author.encode(), np.uint8)
        return msgspec.structs.replace(data, outcome=packed(outcome))

    @override
    def _lay_out(self, state: steps.StepState) -> range:
        return self._algorithm.due(self._chunks.total())

    @override
    def _minibatches(self, batch: range, step: int) -> Iterator[tuple[int, list[int]]]:
        """Updates by the round; one without any where none is due, with which the episodes are stored."""
        for first in range(0, max(1, len(batch)), TOGETHER):
            yield 0, [*batch[first : first + TOGETHER]]

    @override
    def _divisor(self, batch: range, minibatch: list[int]) -> float:
        return float(max(1, len(minibatch)))

    @override
    def _accumulate(self, minibatch: list[int]) -> bool:
        replicas = range(self._rounds.replicas)
        return self._rounds.chunks([minibatch for _ in replicas], [LentPictures() for _ in replicas])

    @override
    def _by_group(
        self, batch: range, state: steps.StepState, minibatch: list[int]
    ) -> Iterable[tuple[GroupRecord, list[int]]]:
        return ()

    @override
    def _suspects(self, batch: range, state: steps.StepState, minibatch: list[int]) -> dict[str, str]:
        """No group: a batch is of many steps' episodes."""
        self._rounds.drop()
        return {}

    @override
    def _learned(self) -> None:
        self._rounds.end_episodes(learned=True)
        actions = self._chunks.total()
        self._algorithm.learned(actions, len(self._algorithm.due(actions)))
        self._chunks.clear()
