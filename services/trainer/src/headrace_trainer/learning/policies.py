"""The policies that learn from a run's steps: one in most runs, which learns from whole groups.

Where several do, each gets what was said by the roles that it plays. A group counts as learned when all have taken it,
and a step moves all or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection
from headrace_schema.sections.policies import OWN as OWN_NAME

from headrace_trainer.algorithms._base import Algorithm, batch_figures_of
from headrace_trainer.errors import Quiesced, Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.intake import admitted
from headrace_trainer.learning.passes import Finished, StepRounds, step_rates
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Trajectory

OWN = ""
"""The run's own policy among the others."""


class AnyLearner(Protocol):
    """What a policy learns with."""

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""

    def finish(self, state: steps.StepState, rate: float, critic_rate: float = 0.0) -> Finished:
        """Makes the optimizer steps of a commit. Raises Quiesced."""

    def reset(self) -> None:
        """Drops the attempt's groups."""


class HeldRounds(Protocol):
    """The rounds that are of all policies together."""

    def hold(self) -> None:
        """Keeps weights and optimizer state as they are, to go back to."""

    def end_hold(self, *, back: bool) -> None:
        """Drops what was held; `back` returns to it first and empties the accumulators."""


@dataclass(eq=False)
class Learning:
    """One policy: how it learns, and what it has been given in the open attempt, where there are several."""

    name: str
    config: TrainerConfig
    algorithm: Algorithm
    learner: AnyLearner
    rounds: StepRounds
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    optimizer: OptimizerSection | None = None
    """In place of the run's own, and of its schedule."""

    def rates(self, state: steps.StepState) -> tuple[float, float]:
        """Learning rates of the open step, of the policy and of its critic's own weights."""
        assert state.begun is not None
        if self.optimizer is not None:
            return self.optimizer.lr, 0.0
        return step_rates(self.config.optimizer, self.algorithm.critic, state.begun.step, self.config.steps)

    def reset(self) -> None:
        """Drops the attempt's groups."""
        self.learner.reset()
        self.records = {}

    def figures(self, finished: Finished, records: Many[GroupRecord], rate: float) -> dict[str, float]:
        """Those of a step that it has made of these groups, from which its algorithm learns too."""
        found = step_figures(finished.steps, records, rate=rate) | batch_figures_of(self.algorithm)
        if "kl_coefficient" in (kept := self.algorithm.state()):
            found["kl_coefficient"] = kept["kl_coefficient"]
        self.algorithm.observe(found, sum(record.sequences for record in records))
        return found


def learn_parts(
    policies: Many[Learning], config: TrainerConfig, state: steps.StepState, groups: Many[Group]
) -> steps.StepState:
    """The state after several policies have learned from their parts of these groups. Raises Refusal CONFLICT."""
    state, fresh = admitted(state, groups, config.algorithm.max_staleness)
    for policy in policies:
        parts = [part_of(group, policy.name, config.played) for group in fresh]
        own = policy.learner.learn(
            replace(state, groups=policy.records), [part for part in parts if part.members]
        )
        policy.records = own.groups
        state = replace(state, tainted=state.tainted or own.tainted)
    for group in fresh:
        record, taint = _joined(policies, group), ""
        if record.disposition is not Disposition.ACCUMULATED:
            state = replace(state, torn={**state.torn, group.digest: record.detail})
            taint = f"prompt {group.prompt_ordinal} was refused by one policy, and another may have learned from it"
        state = steps.learned(state, record, taint=taint)
    return state


def _joined(policies: Many[Learning], group: Group) -> GroupRecord:
    """What became of a group, with all policies."""
    found = [each.records[group.prompt_ordinal] for each in policies if group.prompt_ordinal in each.records]
    for record in found:
        if record.disposition is not Disposition.ACCUMULATED:
            return steps.refused_group(group, record.disposition, record.detail)
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


def finish(
    policies: Many[Learning], rounds: HeldRounds, state: steps.StepState
) -> tuple[Finished, dict[str, float]]:
    """Applies what all policies have learned, or nothing; with the figures of the step.

    Raises Quiesced where nothing has moved, and Refusal STEP_TORN where one policy has moved, another cannot, and
    neither holds anything to go back to.
    """
    held = any(policy.algorithm.passes.several for policy in policies)
    streamed = [policy for policy in policies if not policy.algorithm.passes.several]
    if len(policies) > 1 and not all(policy.rounds.holds() for policy in streamed):
        return Finished([], False), {}
    if held:
        rounds.hold()
    done: list[tuple[Learning, Finished, list[GroupRecord]]] = []
    try:
        for policy in policies:
            own = state if len(policies) == 1 else replace(state, groups=policy.records)
            finished = policy.learner.finish(own, *policy.rates(state))
            if not finished.finite:
                if held:
                    rounds.end_hold(back=True)
                elif done:
                    raise _torn("a gradient was finite and its norm is not")
                return finished, {}
            done.append((policy, finished, own.accumulated))
    except Quiesced as lapsed:
        if held:
            rounds.end_hold(back=True)
            if streamed:  # Their gradient is dropped: the step is made again.
                return Finished([], False), {}
        elif done:
            raise _torn(lapsed.message) from lapsed
        raise
    if held:
        rounds.end_hold(back=False)
    for policy in policies:
        policy.reset()
    return Finished([step for _, finished, _ in done for step in finished.steps], True), _figures(state, done)


def _torn(why: str) -> Refusal:
    return Refusal("STEP_TORN", f"{why}; restore a checkpoint", "unavailable")


def _figures(
    state: steps.StepState, done: Many[tuple[Learning, Finished, list[GroupRecord]]]
) -> dict[str, float]:
    """Of the step; of several policies also each one's as "NAME/FIGURE"."""
    own = {
        policy.name: policy.figures(finished, records, policy.rates(state)[0])
        for policy, finished, records in done
        if records
    }
    if len(done) == 1:
        return own[OWN]
    made = [step for _, finished, _ in done for step in finished.steps]
    figures = step_figures(made, state.accumulated, rate=done[0][0].rates(state)[0])
    figures |= {name: value for name, value in own.get(OWN, {}).items() if name == "kl_coefficient"}
    for policy, _, records in done:
        if records:
            tokens = float(sum(record.tokens for record in records))
            named = {**own[policy.name], "tokens": tokens}
            figures |= {f"{policy.name or OWN_NAME}/{name}": value for name, value in named.items()}
    return figures


def part_of(group: Group, policy: str, played: Mapping[str, str]) -> Group:
    """What a group says of the roles that a policy plays ("" plays those that are not in `played`).

    Its members are those in which it spoke, and its digest is the whole's.
    """
    found = [_own(member, policy, played) for member in group.members]
    return replace(group, members=tuple(member for member in found if member.samples))


def _own(member: Trajectory, policy: str, played: Mapping[str, str]) -> Trajectory:
    """A member's samples of these roles, which are worth what these earned."""
    mine = tuple(sample for sample in member.samples if played.get(sample.role, "") == policy)
    return replace(member, samples=mine, reward=sum(turn.reward for sample in mine for turn in sample.turns))
