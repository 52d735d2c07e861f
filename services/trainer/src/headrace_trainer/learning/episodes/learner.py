"""Learning from episodes of a robot policy: a step's chunks in several passes, at the commit.

Runs on the leader, which keeps the episodes until then. Knows no wire; the step's rules are `step`'s.
Shapes: B episodes, T chunks of the longest, C actions of a chunk, A numbers of an action; N chunks of all episodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms.episodes._base import EpisodeAlgorithm
from headrace_trainer.errors import Quiesced
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.episodes.credit import KeptEpisode, Plan, plan_credit
from headrace_trainer.learning.episodes.data import EpisodeData, EpisodeScores, Packed, packed
from headrace_trainer.learning.intake import not_finite, unfit
from headrace_trainer.learning.packing.work import Finished, OptimizerStep, StepRounds, moved_far
from headrace_trainer.learning.samples import Disposition, EpisodeMember, Group, GroupRecord


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


class EpisodeLearner:
    """Keeps one run's episodes, and learns from them in `passes` when the step is committed.

    Every pass goes through the chunks of all episodes in an order that seed, step and pass decide, and an optimizer
    step follows each minibatch of them. What is not finite, in whichever pass, leaves the base as it was.
    """

    def __init__(self, config: TrainerConfig, algorithm: EpisodeAlgorithm, rounds: StepRounds) -> None:
        self._config = config
        self._algorithm = algorithm
        self._rounds = rounds
        self._kept: dict[str, _Kept] = {}

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        fresh: list[Group] = []
        for group in sorted(groups, key=lambda group: group.prompt_ordinal):
            limit = self._config.algorithm.max_staleness
            record = steps.known(state, group) or unfit(state, group, limit)
            if record is None:
                fresh.append(group)
            else:
                state = steps.learned(state, record)
        for kept in self._read(fresh):
            record = _record(state, kept.group)
            if problem := kept.problem():
                record = not_finite(record, problem)
            self._kept[kept.group.digest] = kept
            state = steps.learned(state, record)
        return state

    def finish(self, state: steps.StepState, rate: float) -> Finished:
        """All passes, or none of them. Raises Quiesced, the base restored, when a lease has lapsed in between."""
        batch = [self._kept[record.digest] for record in state.accumulated]
        plan = plan_credit([kept.episodes for kept in batch], self._algorithm)
        self._rounds.credit(plan.data)
        several = self._algorithm.passes.several
        if several:
            self._rounds.hold()
        try:
            finished = self._passes(plan, state, rate)
        except Quiesced:
            self._back(several)
            raise
        if not finished.finite:
            self._back(several)
            return finished
        self._end(learned=True)
        if several:
            self._rounds.end_hold(back=False)
        return finished

    def reset(self) -> None:
        """Forgets the attempt's episodes."""
        if self._kept:
            self._end(learned=False)

    def _end(self, *, learned: bool) -> None:
        self._rounds.end_episodes(learned=learned)
        self._kept = {}

    def _read(self, groups: list[Group]) -> list[_Kept]:
        """The groups with what the policy thinks of their episodes."""
        if not groups:
            return []
        data = [_data(group, member) for group in groups for member in _members(group)]
        scores = {found.key: found for found in self._rounds.read(data)}
        return [
            _Kept(
                group,
                [
                    _kept(group, member, scores[group.prompt_ordinal, member.sample_index])
                    for member in _members(group)
                ],
            )
            for group in groups
        ]

    def _back(self, held: bool) -> None:
        if held:
            self._rounds.end_hold(back=True)
        else:
            self._rounds.drop()

    def _passes(self, plan: Plan, state: steps.StepState, rate: float) -> Finished:
        assert state.begun is not None
        done: list[OptimizerStep] = []
        for epoch, chosen in self._minibatches(plan, state.begun.step):
            if epoch and done and moved_far(self._algorithm.passes, done[-1].report):
                break
            divisor = plan.denominator(self._algorithm, chosen)
            if not self._rounds.chunks(self._shares(chosen)):
                return Finished(done, False, self._suspects(plan, state, chosen))
            report = self._rounds.apply(divisor, rate)
            if not report.finite:
                return Finished(done, False, self._suspects(plan, state, chosen))
            done.append(OptimizerStep(report, divisor, epoch))
        return Finished(done, True)

    def _minibatches(self, plan: Plan, step: int) -> Iterator[tuple[int, list[int]]]:
        """(pass, chunks that are learned from); as equal in size as can be."""
        passes, learned = self._algorithm.passes, plan.learned
        count = len(learned)
        parts = passes.parts(count)
        for epoch in range(passes.epochs):
            seed = random.Random(f"{self._config.seed}/passes/{step}/{epoch}").getrandbits(64)
            order = np.random.default_rng(seed).permutation(learned)
            for part in range(parts):
                yield epoch, np.sort(order[part * count // parts : (part + 1) * count // parts]).tolist()

    def _shares(self, chosen: list[int]) -> list[list[int]]:
        ranks = self._rounds.replicas
        return [chosen[rank::ranks] for rank in range(ranks)]

    def _suspects(self, plan: Plan, state: steps.StepState, minibatch: list[int]) -> dict[str, str]:
        """Which groups of the minibatch are not finite by themselves, under the weights of the moment."""
        found = {}
        for place, record in enumerate(state.accumulated):
            own = [chunk for chunk in minibatch if plan.groups_N[chunk] == place]
            self._rounds.drop()
            if not self._rounds.chunks(self._shares(own)):
                found[record.digest] = not_finite(record).detail
            elif not self._rounds.holds():
                found[record.digest] = not_finite(record, "gradient").detail
        self._rounds.drop()
        return found


def _members(group: Group) -> list[EpisodeMember]:
    return [member for member in group.members if isinstance(member, EpisodeMember)]


def _data(group: Group, member: EpisodeMember) -> EpisodeData:
    episode = member.episode
    return EpisodeData(
        key=(group.prompt_ordinal, member.sample_index),
        prompt=member.tokens,
        observation=packed(episode.observation),
        sampled=packed(episode.sampled),
        valid_TC=Packed.of(episode.valid_TC),
        final=packed(episode.final_observation if episode.truncated else {}),
    )


def _kept(group: Group, member: EpisodeMember, scores: EpisodeScores) -> KeptEpisode:
    episode = member.episode
    return KeptEpisode(
        key=(group.prompt_ordinal, member.sample_index),
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
    )


def _record(state: steps.StepState, group: Group) -> GroupRecord:
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
