"""Learning with several policies from the same conversations: each gets what was said by the roles that it plays.

Each policy has a learner of its own. A group counts as learned when all have taken it, and a step moves all or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.policies import OWN as OWN_NAME
from typing_extensions import override

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.errors import Quiesced, Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.intake import admitted, refused
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.passes import Finished, StepRounds, step_rates
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import (
    Columns,
    Disposition,
    Group,
    GroupRecord,
    Member,
    Rows,
    Sequence,
)

OWN = ""
"""The run's own policy among the others."""


class PolicyRounds(StepRounds):
    """The rounds of one policy among several, the `policy`-th.

    What is held and given back is all of them, so a policy's learner holds nothing of its own: see `PoliciesLearner`.
    """

    def __init__(self, rounds: StepRounds, policy: int) -> None:
        self._rounds, self.policy = rounds, policy
        self.critic_rate = 0.0

    @contextmanager
    def _chosen(self) -> Iterator[StepRounds]:
        self._rounds.policy, self._rounds.critic_rate = self.policy, self.critic_rate
        try:
            yield self._rounds
        finally:
            self._rounds.policy = 0

    @property
    @override
    def replicas(self) -> int:
        with self._chosen() as rounds:
            return rounds.replicas

    @property
    @override
    def shares_prefixes(self) -> bool:
        with self._chosen() as rounds:
            return rounds.shares_prefixes

    @property
    @override
    def costs(self) -> Costs:
        with self._chosen() as rounds:
            return rounds.costs

    @override
    def micro(self, work: Many[list[Rows]]) -> list[bool]:
        with self._chosen() as rounds:
            return rounds.micro(work)

    @override
    def balance(self, works: Many[list[Rows]], denominator: float) -> None:
        with self._chosen() as rounds:
            rounds.balance(works, denominator)

    @override
    def holds(self) -> bool:
        with self._chosen() as rounds:
            return rounds.holds()

    @override
    def infer(self, groups: Many[list[Sequence]], columns: Many[str]) -> list[list[Columns]]:
        with self._chosen() as rounds:
            return rounds.infer(groups, columns)

    @override
    def apply(self, denominator: float, rate: float) -> CommitReport:
        with self._chosen() as rounds:
            return rounds.apply(denominator, rate)

    @override
    def hold(self) -> None:
        """All policies are held by who asks them one after the other."""

    @override
    def end_hold(self, *, back: bool) -> None:
        """As `hold`."""

    @override
    def drop(self) -> None:
        self._rounds.drop()


@dataclass(eq=False)
class Learning:
    """One policy: how it learns, and what it has been given in the open attempt."""

    name: str
    config: TrainerConfig
    algorithm: Algorithm
    learner: Learner | BatchLearner
    rounds: PolicyRounds
    records: Mapping[int, GroupRecord] = field(default_factory=dict)

    def state(self, state: steps.StepState) -> steps.StepState:
        """The run's state, with the policy's own records."""
        return replace(state, groups=self.records)


class PoliciesLearner:
    """Gives each group to all policies; one optimizer step of each follows at the commit, or several."""

    def __init__(self, config: TrainerConfig, policies: Many[Learning], rounds: StepRounds) -> None:
        self._config, self._policies, self._rounds = config, policies, rounds
        self._unfit: dict[str, str] = {}
        """Groups that were found not finite after a part of them was learned: digest → what is wrong."""

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        for group in groups:
            if (problem := self._unfit.get(group.digest)) is not None:
                state = steps.learned(state, refused(group, Disposition.NONFINITE, problem))
        state, fresh = admitted(state, groups, self._config.algorithm.max_staleness)
        for policy in self._policies:
            parts = [part_of(group, policy.name, self._config.played) for group in fresh]
            own = policy.learner.learn(policy.state(state), [part for part in parts if part.members])
            policy.records = own.groups
            state = replace(state, tainted=state.tainted or own.tainted)
        for group in fresh:
            record = self._joined(group)
            taint = ""
            if record.disposition is not Disposition.ACCUMULATED:
                self._unfit[group.digest] = record.detail
                taint = f"prompt {group.prompt_ordinal} was refused by one policy, and another may have learned from it"
            state = steps.learned(state, record, taint=taint)
        return state

    def _joined(self, group: Group) -> GroupRecord:
        """What became of a group, with all policies."""
        found = [each.records[group.prompt_ordinal] for each in self._taken(group)]
        for record in found:
            if record.disposition is not Disposition.ACCUMULATED:
                return refused(group, record.disposition, record.detail)
        return GroupRecord(
            prompt_ordinal=group.prompt_ordinal,
            digest=group.digest,
            keys=tuple(group.keys()),
            disposition=Disposition.ACCUMULATED,
            sequences=len(group.members),
            trained_sequences=sum(record.trained_sequences for record in found),
            tokens=sum(record.tokens for record in found),
            staleness=max((record.staleness for record in found), default=0),
            all_equal=all(record.all_equal for record in found),
            tokens_by_version=sum((record.tokens_by_version for record in found), Counter()),
            rewards=tuple(member.reward for member in group.members),
            answer_lengths=tuple(member.sampled for member in group.members),
        )

    def _taken(self, group: Group) -> list[Learning]:
        return [each for each in self._policies if group.prompt_ordinal in each.records]

    def finish(self, state: steps.StepState, rate: float) -> Finished:
        """Applies what all policies have learned, or nothing.

        Raises Quiesced where nothing has moved, and Refusal STEP_TORN where a lease lapsed between two policies that
        hold nothing to go back to.
        """
        held = any(policy.algorithm.passes.several for policy in self._policies)
        streamed = [policy for policy in self._policies if not policy.algorithm.passes.several]
        if not all(policy.rounds.holds() for policy in streamed):
            return Finished([], False)
        if held:
            self._rounds.hold()
        done: list[Finished] = []
        try:
            for policy in self._policies:
                finished = self._apply(policy, state)
                if not finished.finite:
                    return self._back(held, finished)
                done.append(finished)
        except Quiesced as lapsed:
            if held:
                self._back(held, Finished([], False))
                if streamed:  # Their gradient is dropped: the step is made again.
                    return Finished([], False)
            elif done:
                raise Refusal(
                    "STEP_TORN", f"{lapsed.message}; restore a checkpoint", "unavailable"
                ) from lapsed
            raise
        if held:
            self._rounds.end_hold(back=False)
        figures = {key: value for finished in done for key, value in finished.figures.items()}
        self.reset()
        return Finished([step for finished in done for step in finished.steps], True, figures=figures)

    def _apply(self, policy: Learning, state: steps.StepState) -> Finished:
        assert state.begun is not None
        config, own = policy.config, policy.state(state)
        rates = step_rates(config.optimizer, policy.algorithm.critic, state.begun.step, config.steps)
        policy.rounds.critic_rate = rates[1]
        finished = policy.learner.finish(own, rates[0])
        if not finished.finite or not own.accumulated:
            return finished
        figures = step_figures(finished.steps, own.accumulated, rate=rates[0], seconds=0.0)
        figures["tokens"] = float(sum(record.tokens for record in own.accumulated))
        del figures["learn_seconds"]
        if "kl_coefficient" in (kept := policy.algorithm.state()):
            figures["kl_coefficient"] = kept["kl_coefficient"]
        policy.algorithm.observe(figures, sum(record.sequences for record in own.accumulated))
        return replace(
            finished, figures={f"{policy.name or OWN_NAME}/{name}": v for name, v in figures.items()}
        )

    def _back(self, held: bool, finished: Finished) -> Finished:
        if not held and finished.steps:
            raise Refusal(
                "STEP_TORN", "a gradient was finite and its norm is not; restore a checkpoint", "unavailable"
            )
        if held:
            self._rounds.end_hold(back=True)
        return replace(finished, steps=[])

    def reset(self) -> None:
        """Drops the attempt's groups."""
        for policy in self._policies:
            policy.learner.reset()
            policy.records = {}


def part_of(group: Group, policy: str, played: Mapping[str, str]) -> Group:
    """What a group says of the roles that a policy plays ("" plays those that are not in `played`).

    Its members are those in which it spoke, and its digest is the whole's.
    """
    found = [_own(member, policy, played) for member in group.members]
    return replace(group, members=tuple(member for member in found if member.branches))


def _own(member: Member, policy: str, played: Mapping[str, str]) -> Member:
    """A member's branches of these roles, which are worth what these earned."""
    mine = tuple(branch for branch in member.branches if played.get(branch.role, "") == policy)
    return replace(member, branches=mine, reward=sum(turn.reward for branch in mine for turn in branch.turns))
