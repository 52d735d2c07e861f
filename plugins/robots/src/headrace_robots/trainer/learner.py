"""Learning from episodes of a robot policy: what a step's chunks are worth, and several passes over them at the commit.

Runs on the leader, which keeps the episodes until then. Knows no wire and no model; the step's rules are `step`'s.
Shapes: B episodes, T chunks of the longest, C actions of a chunk, A numbers of an action; N chunks of all episodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import IMAGE, Episode
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.intake import admitted
from headrace_trainer.learning.passes import EpisodeRounds, PassesLearner
from headrace_trainer.learning.samples import (
    CreditData,
    Disposition,
    EpisodeData,
    EpisodeKey,
    EpisodeMember,
    EpisodeScores,
    Group,
    GroupRecord,
    LentPictures,
    Packed,
    packed,
)
from torch import Tensor
from typing_extensions import override

from headrace_robots.trainer.algorithms._base import Credit, EpisodeAlgorithm, EpisodeOutcomes


@dataclass(frozen=True)
class KeptEpisode:
    """An episode on the leader: outcomes, the engine's log-probs, and those of the weights at which the step began."""

    key: EpisodeKey
    reward: float
    trained: bool
    terminated: bool
    valid_TC: np.ndarray
    rewards_TC: np.ndarray
    successes_TC: np.ndarray
    engine_log_probs_TCA: np.ndarray
    old_log_probs_TCA: np.ndarray
    values_T: np.ndarray
    final_value: float
    owner: int
    """The replica that has its pictures."""
    pictures: Mapping[str, np.ndarray]
    persons_TC: np.ndarray
    """True at chunks in which a person acted: the policy did not draw what was done, so that they carry no loss."""


@dataclass(frozen=True)
class Plan:
    """What ranks are told, and what the leader keeps of it.

    `groups_N` is each chunk's group, by place; `units_N` its units that are learned from, `shares_N` how much of its
    episode they are. `learned` numbers the chunks that have any.
    """

    data: CreditData
    groups_N: list[int]
    units_N: np.ndarray
    shares_N: np.ndarray

    @property
    def learned(self) -> list[int]:
        """Numbers of the chunks that are learned from."""
        found: list[int] = np.flatnonzero(self.units_N).tolist()
        return found

    def denominator(self, algorithm: EpisodeAlgorithm, chunks: list[int]) -> float:
        """What the sum over these chunks is divided by."""
        return algorithm.denominator(float(self.units_N[chunks].sum()), float(self.shares_N[chunks].sum()))


@dataclass(frozen=True)
class _Kept:
    """A group's episodes, with what the policy thought of them when the step began."""

    group: Group
    episodes: list[KeptEpisode]

    def problem(self) -> str:
        """What is not finite under the weights; empty where all is."""
        for kept in self.episodes:
            if not np.isfinite(kept.old_log_probs_TCA).all():
                return "log-prob"
            if not (np.isfinite(kept.values_T).all() and np.isfinite(kept.final_value)):
                return "value"
        return ""


class EpisodeLearner(PassesLearner[Plan, int]):
    """Keeps one run's episodes, and learns from their chunks in `passes` when the step is committed."""

    _rounds: EpisodeRounds

    def __init__(self, config: TrainerConfig, algorithm: EpisodeAlgorithm, rounds: EpisodeRounds) -> None:
        super().__init__(config, algorithm, rounds)
        self._algorithm = algorithm
        self._kept: dict[str, _Kept] = {}
        self._owned: Counter[int] = Counter()
        """Chunks of the step's episodes by the replica that owns them."""
        self._owners: list[tuple[KeptEpisode, int]] = []
        """Of each chunk that was laid out: its episode, and its place in it."""

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        state, fresh = admitted(state, groups, self._config.algorithm.max_staleness)
        for kept in self._read(fresh):
            record = record_of(state, kept.group)
            if problem := kept.problem():
                record = steps.not_finite(record, problem)
            self._kept[kept.group.digest] = kept
            state = steps.learned(state, record)
        return state

    def reset(self) -> None:
        """Drops the attempt's episodes."""
        if self._kept:
            self._end(learned=False)

    def _end(self, *, learned: bool) -> None:
        self._rounds.end_episodes(learned=learned)
        self._kept, self._owners = {}, []
        self._owned.clear()

    def _read(self, groups: list[Group]) -> list[_Kept]:
        """The groups with what the policy thinks of their episodes."""
        if not groups:
            return []
        data = [data_of(key, member) for group in groups for key, member in keyed(group)]
        owners = {each.key: self._owner(each) for each in data}
        scores = {found.key: found for found in self._rounds.read(data, [*owners.values()])}
        return [
            _Kept(
                group,
                [_kept(member, scores[key], owners[key]) for key, member in keyed(group)],
            )
            for group in groups
        ]

    def _owner(self, data: EpisodeData) -> int:
        """The replica that has the fewest chunks so far."""
        replica = min(range(self._rounds.replicas), key=self._owned.__getitem__)
        self._owned[replica] += data.valid_TC.shape[0]
        return replica

    @override
    def _lay_out(self, state: steps.StepState) -> Plan:
        batch = [self._kept[record.digest] for record in state.accumulated]
        plan = plan_credit([kept.episodes for kept in batch], self._algorithm)
        episodes = [episode for kept in batch for episode in kept.episodes]
        self._owners = [(episode, place) for episode in episodes for place in range(len(episode.values_T))]
        self._rounds.credit(plan.data)
        return plan

    @override
    def _minibatches(self, batch: Plan, step: int) -> Iterator[tuple[int, list[int]]]:
        learned = batch.learned
        count = len(learned)
        parts = self._passes.parts(count)
        for epoch in range(self._passes.epochs):
            seed = random.Random(f"{self._config.seed}/passes/{step}/{epoch}").getrandbits(64)
            order = np.random.default_rng(seed).permutation(learned)
            for part in range(parts):
                yield epoch, np.sort(order[part * count // parts : (part + 1) * count // parts]).tolist()

    @override
    def _divisor(self, batch: Plan, minibatch: list[int]) -> float:
        return batch.denominator(self._algorithm, minibatch)

    @override
    def _accumulate(self, minibatch: list[int]) -> bool:
        work, lent = self._shares(minibatch)
        return self._rounds.chunks(work, [self._pictures(chunks) for chunks in lent])

    def _shares(self, minibatch: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Equal shares of a minibatch for the replicas, and which chunks of each it does not own: as few as can be."""
        replicas = self._rounds.replicas
        rooms = [len(minibatch[replica::replicas]) for replica in range(replicas)]
        work: list[list[int]] = [[] for _ in rooms]
        over: list[int] = []
        for chunk in minibatch:
            own = work[(owner := self._owners[chunk][0].owner)]
            (own if len(own) < rooms[owner] else over).append(chunk)
        lent: list[list[int]] = [[] for _ in rooms]
        for replica, own in enumerate(work):
            taken = rooms[replica] - len(own)
            lent[replica], over = over[:taken], over[taken:]
        return [sorted(own + more) for own, more in zip(work, lent, strict=True)], lent

    def _pictures(self, chunks: list[int]) -> LentPictures:
        seen = [self._owners[chunk] for chunk in chunks]
        if not seen or not seen[0][0].pictures:
            return LentPictures()
        names = seen[0][0].pictures
        stacked = {
            name: np.stack([episode.pictures[name][place] for episode, place in seen]) for name in names
        }
        return LentPictures(chunks, packed(stacked))

    @override
    def _by_group(
        self, batch: Plan, state: steps.StepState, minibatch: list[int]
    ) -> Iterable[tuple[GroupRecord, list[int]]]:
        for place, record in enumerate(state.accumulated):
            yield record, [chunk for chunk in minibatch if batch.groups_N[chunk] == place]

    @override
    def _learned(self) -> None:
        self._end(learned=True)


def _members(group: Group) -> list[EpisodeMember]:
    return [member for member in group.members if isinstance(member, EpisodeMember)]


def keyed(group: Group) -> list[tuple[EpisodeKey, EpisodeMember]]:
    """A group's episodes by their keys."""
    return [((group.prompt_ordinal, member.sample_index), member) for member in _members(group)]


def data_of(key: EpisodeKey, member: EpisodeMember) -> EpisodeData:
    """An episode as ranks are given it."""
    episode = member.episode
    return EpisodeData(
        key=key,
        prompt=member.instruction,
        observation=packed(episode.observation),
        sampled=packed(episode.sampled),
        valid_TC=Packed.of(episode.valid_TC),
        final=packed(episode.final_observation if episode.truncated else {}),
    )


def _kept(member: EpisodeMember, scores: EpisodeScores, owner: int) -> KeptEpisode:
    episode = member.episode
    return KeptEpisode(
        key=scores.key,
        reward=member.reward,
        trained=not member.masked,
        terminated=episode.terminated,
        valid_TC=episode.valid_TC,
        rewards_TC=episode.rewards_TC,
        successes_TC=episode.successes_TC,
        engine_log_probs_TCA=episode.log_probs_TCA,
        old_log_probs_TCA=scores.log_probs_TCA.array(),
        values_T=scores.values_T.array(),
        final_value=scores.final_value,
        owner=owner,
        pictures={name: seen for name, seen in episode.observation.items() if name.startswith(IMAGE)},
        persons_TC=_persons(episode),
    )


def _persons(episode: Episode) -> np.ndarray:
    if episode.intervened_TC is None:
        return np.zeros_like(episode.valid_TC)
    return np.broadcast_to(episode.intervened_TC.any(1, keepdims=True), episode.valid_TC.shape)


def record_of(state: steps.StepState, group: Group) -> GroupRecord:
    """Counts are of executed actions."""
    members = _members(group)
    by_version = Counter(version for m in members if not m.masked for version in m.versions)
    rewards = tuple(member.reward for member in members)
    return GroupRecord(
        prompt_ordinal=group.prompt_ordinal,
        digest=group.digest,
        keys=tuple(group.keys()),
        disposition=Disposition.ACCUMULATED,
        sequences=len(members),
        trained_sequences=sum(not member.masked for member in members),
        tokens=by_version.total(),
        staleness=steps.staleness(state, set(by_version)),
        all_equal=len(set(rewards)) == 1,
        tokens_by_version=by_version,
        rewards=rewards,
        answer_lengths=tuple(member.episode.steps for member in members),
    )


def plan_credit(groups: Many[Many[KeptEpisode]], algorithm: EpisodeAlgorithm) -> Plan:
    """What every chunk of these groups' episodes is worth."""
    kept = [(place, episode) for place, group in enumerate(groups) for episode in group]
    episodes = [episode for _, episode in kept]
    credit = algorithm.credit(_outcomes(kept))
    mask_NC = _flat(credit.mask_BTC, episodes) & ~np.concatenate([each.persons_TC for each in episodes])
    units_N = _units(mask_NC, algorithm, episodes[0].old_log_probs_TCA.shape[-1])
    lengths = [len(episode.values_T) for episode in episodes]
    starts = np.cumsum([0, *lengths[:-1]])
    totals_N = np.repeat(np.add.reduceat(units_N, starts), lengths)
    weights_N = np.array([algorithm.token_weight(max(1, int(total))) for total in totals_N])
    data = CreditData(
        keys=[episode.key for episode in episodes],
        old_log_probs_NCA=_joined(episodes, lambda each: each.old_log_probs_TCA),
        engine_log_probs_NCA=_joined(episodes, lambda each: each.engine_log_probs_TCA),
        values_N=_joined(episodes, lambda each: each.values_T),
        advantages=Packed.of(_flat(credit.advantages, episodes)),
        mask_NC=Packed.of(mask_NC),
        weights_N=Packed.of(weights_N),
        returns_N=_returns(credit, episodes),
    )
    places = [place for (place, _), length in zip(kept, lengths, strict=True) for _ in range(length)]
    return Plan(data, places, units_N, units_N / np.maximum(1, totals_N))


def _outcomes(kept: Many[tuple[int, KeptEpisode]]) -> EpisodeOutcomes:
    episodes = [episode for _, episode in kept]
    return EpisodeOutcomes(
        rewards_B=torch.tensor([each.reward for each in episodes], dtype=torch.float64),
        groups_B=torch.tensor([place for place, _ in kept]),
        trained_B=torch.tensor([each.trained for each in episodes]),
        rewards_BTC=_padded([each.rewards_TC for each in episodes]).double(),
        successes_BTC=_padded([each.successes_TC for each in episodes]),
        valid_BTC=_padded([each.valid_TC for each in episodes]),
        values_BT=_padded([each.values_T for each in episodes]).double(),
        final_values_B=torch.tensor([each.final_value for each in episodes], dtype=torch.float64),
        terminated_B=torch.tensor([each.terminated for each in episodes]),
    )


def _units(mask_NC: np.ndarray, algorithm: EpisodeAlgorithm, numbers: int) -> np.ndarray:
    """How many units of each chunk are learned from."""
    if algorithm.level == "chunk":
        return np.asarray(np.any(mask_NC, -1), np.int64)
    each = numbers if algorithm.level == "token" else 1
    return np.asarray(np.count_nonzero(mask_NC, -1), np.int64) * each


def _returns(credit: Credit, episodes: Many[KeptEpisode]) -> Packed | None:
    return None if credit.returns_BT is None else Packed.of(_flat(credit.returns_BT, episodes))


def _padded(arrays: Many[np.ndarray]) -> Tensor:
    """(B, T, …), 0 behind the end of an episode."""
    longest = max(map(len, arrays))
    whole = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(whole)


def _flat(values_BT: Tensor, episodes: Many[KeptEpisode]) -> np.ndarray:
    """(N, …): the chunks of each episode, one after the other."""
    rows = zip(values_BT.numpy(), episodes, strict=True)
    return np.concatenate([row[: len(episode.values_T)] for row, episode in rows])


def _joined(episodes: Many[KeptEpisode], part: Callable[[KeptEpisode], np.ndarray]) -> Packed:
    return Packed.of(np.concatenate([part(episode) for episode in episodes]))
