"""From a settled group to a record and sequences: what is refused, what carries loss, what advantages are made of.

Knows no rounds and no optimizer.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    RETURNS,
    VALUES,
    Algorithm,
    Outcomes,
    Turns,
    branch_weights_of,
    turn_credit_of,
)
from headrace_trainer.algorithms._turns import by_role, by_turn
from headrace_trainer.algorithms.functional.advantages.returns import Advantages
from headrace_trainer.errors import Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import (
    Branch,
    Columns,
    Disposition,
    Group,
    GroupRecord,
    Member,
    Sequence,
)
from headrace_trainer.learning.turns import double, padded, turns_of

if TYPE_CHECKING:
    from headrace_trainer.learning.passes import StepRounds


@dataclass(frozen=True)
class Inferred:
    """A group with the columns of each member; those of a member that carries no loss are empty.

    `following` has a value for each member: of the end of what was cut, where the critic bootstraps, else 0.
    """

    group: Group
    columns: tuple[Columns, ...]
    following: tuple[float, ...]

    def problem(self) -> str:
        """What is not finite among the columns; empty where all is."""
        for columns in self.columns:
            for name, values in columns.items():
                if not all(math.isfinite(value) for value in values):
                    return f"{name} column"
        return "" if all(math.isfinite(value) for value in self.following) else "value of a cut answer's end"


@dataclass(frozen=True)
class Prepared:
    """A group ready for its forward: `sequences` is empty when its gradient is known to be zero."""

    record: GroupRecord
    sequences: list[Sequence]


class Intake:
    """What groups of one run are turned into."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm) -> None:
        self._config = config
        self._algorithm = algorithm

    def inferred(self, groups: Many[Group], rounds: StepRounds) -> Iterator[Inferred]:
        """These groups, in order, with the algorithm's columns under the weights at which their step began.

        Called once for each group, when it arrives: so a streamed step stays streamed. There is no round where the
        algorithm needs no column.
        """
        if not (self._algorithm.columns and groups):
            for group in groups:
                nothing = len(group.members)
                yield Inferred(group, ({},) * nothing, (0.0,) * nothing)
            return
        bare = [self.bare(group) for group in groups]
        for group, found in zip(groups, rounds.infer(bare, self._algorithm.columns), strict=True):
            yield self._inferred(group, iter(found))

    def _inferred(self, group: Group, found: Iterator[Columns]) -> Inferred:
        columns: list[Columns] = []
        following: list[float] = []
        for member in group.members:
            own: Columns = {}
            following.append(0.0)
            for branch in self.learned(member):
                read = next(found)
                if self.bootstraps(branch):
                    following[-1] = read[VALUES][-1]
                for name, values in read.items():
                    own.setdefault(name, []).extend(values[: len(branch.trained)])
            columns.append(own)
        return Inferred(group, tuple(columns), tuple(following))

    def prepare(self, state: steps.StepState, batch: Many[Inferred]) -> list[Prepared]:
        """Groups whose advantages are computed together: each alone, or a step's whole batch, which may be empty."""
        if not batch:
            return []
        outcomes, credit = self._outcomes(state, batch), turn_credit_of(self._algorithm)
        compute, least = self._algorithm.advantages, self._algorithm.least_group
        if credit is not None and credit.apart:
            compute = partial(by_turn, compute, discount=credit.discount, least=least)
        if outcomes.turns is not None and outcomes.turns.roles_BN is not None:
            computed = by_role(compute, outcomes, least, credit=credit is not None)
        else:
            computed = compute(outcomes)
        advantages_BT, returns_BT = computed if isinstance(computed, Advantages) else (computed, None)
        advantages = iter(advantages_BT.tolist())
        returns = None if returns_BT is None else iter(returns_BT.tolist())
        found = []
        for inferred in batch:
            lengths = [_tokens(self.learned(member)) for member in inferred.group.members]
            own = [next(advantages)[:length] for length in lengths]
            targets = [{RETURNS: next(returns)[:length]} if returns else {} for length in lengths]
            needed = self._algorithm.every_token or any(any(each) for each in own)
            sequences = self._sequences(inferred, own, targets) if needed else []
            record = replace(self.record(state, inferred.group), advantages=tuple(map(_mean, own)))
            found.append(Prepared(record, sequences))
        return found

    def record(self, state: steps.StepState, group: Group) -> GroupRecord:
        """The record of a group that is learned from."""
        learned = [self.learned(member) for member in group.members]
        lengths, shares = [*map(_tokens, learned)], [*map(self._share, learned)]
        by_version = Counter(version for own in learned for branch in own for version in branch.versions)
        sampled = [member for member in group.members if not self._is_baseline(member)]
        rewards = tuple(member.reward for member in sampled)
        return GroupRecord(
            prompt_ordinal=group.prompt_ordinal,
            digest=group.digest,
            keys=tuple(group.keys()),
            disposition=Disposition.ACCUMULATED,
            sequences=len(group.members),
            trained_sequences=round(
                sum(share * len(own) for share, own in zip(shares, learned, strict=True))
            ),
            tokens=sum(lengths),
            weighed_tokens=math.fsum(share * length for share, length in zip(shares, lengths, strict=True)),
            staleness=steps.staleness(state, set(by_version)),
            all_equal=len({(m.reward, *(turn.reward for turn in m.turns)) for m in sampled}) == 1,
            tokens_by_version=by_version,
            rewards=rewards,
            answer_lengths=tuple(member.sampled for member in sampled),
        )

    def learned(self, member: Member) -> list[Branch]:
        """Branches that carry loss: none of a masked answer, a baseline, or a cut one where those are masked."""
        hidden = (
            member.masked
            or self._is_baseline(member)
            or (member.truncated and self._config.algorithm.truncated == "mask")
        )
        return [] if hidden else [branch for branch in member.branches if branch.trained]

    def _is_baseline(self, member: Member) -> bool:
        return self._algorithm.greedy_first and member.sample_index == 0

    def _share(self, branches: Many[Branch]) -> float:
        """What each branch of a member weighs."""
        whole = any(branch.role for branch in branches) or branch_weights_of(self._algorithm) == "whole"
        return 1.0 if whole else 1.0 / max(1, len(branches))

    def _outcomes(self, state: steps.StepState, batch: Many[Inferred]) -> Outcomes:
        members = [(index, member) for index, each in enumerate(batch) for member in each.group.members]
        trained_B = torch.tensor([_tokens(self.learned(member)) for _, member in members])
        # Where no answer carries loss there is one place all the same: not every function takes tensors without any.
        places_T = torch.arange(max(1, int(trained_B.max())))
        return Outcomes(
            rewards_B=double([member.reward for _, member in members]),
            groups_B=torch.tensor([index for index, _ in members]),
            mask_BT=places_T < trained_B[:, None],
            lengths_B=torch.tensor([_longest_turn(member) for _, member in members]),
            longest=self._config.sampling.max_new_tokens,
            draw=random.Random(
                f"{self._config.seed}/draw/{state.begun.step if state.begun else 0}"
            ).getrandbits(48),
            columns_BT=self._columns([own for each in batch for own in each.columns], places_T.numel()),
            bootstrap_values_B=self._following(batch),
            turns=self._turns([member for _, member in members]),
            greedy_B=torch.tensor([self._is_baseline(member) for _, member in members])
            if self._algorithm.greedy_first
            else None,
        )

    def _turns(self, members: Many[Member]) -> Turns | None:
        """Where credit goes by turn, or by role."""
        credit = turn_credit_of(self._algorithm)
        if credit is None and not any(branch.role for member in members for branch in member.branches):
            return None
        return turns_of(members, 1.0 if credit is None else credit.discount)

    def _following(self, batch: Many[Inferred]) -> Tensor | None:
        critic = self._algorithm.critic
        if critic is None or not critic.bootstraps:
            return None
        return double([value for each in batch for value in each.following])

    def _columns(self, columns: Many[Columns], longest: int) -> dict[str, Tensor]:
        """(B, T) by name, 0 where a sample has no token."""
        return {
            name: double([padded(own.get(name, []), longest) for own in columns])
            for name in self._algorithm.columns
        }

    def bare(self, group: Group) -> list[Sequence]:
        """Those of the group's members that carry loss, as the infer pass reads them."""
        return [
            _with_end(branch.sequence()) if self.bootstraps(branch) else branch.sequence()
            for member in group.members
            for branch in self.learned(member)
        ]

    def bootstraps(self, branch: Branch) -> bool:
        """Whether the infer pass reads a branch to its end: its columns are one longer, by the value of the end."""
        critic = self._algorithm.critic
        return critic is not None and critic.bootstraps and branch.cut

    def _sequences(
        self, inferred: Inferred, advantages: Many[list[float]], targets: Many[Columns]
    ) -> list[Sequence]:
        """Those of the group's members that carry loss, with an entry of advantages and targets for every member."""
        found = []
        for member, own, columns, more in zip(
            inferred.group.members, advantages, inferred.columns, targets, strict=True
        ):
            kept = {**self._kept(columns), **more}
            branches, end = self.learned(member), 0
            share = self._share(branches)
            for branch in branches:
                part = slice(end, end := end + len(branch.trained))
                sequence = msgspec.structs.replace(
                    branch.sequence(),
                    advantages=own[part],
                    weight=self._algorithm.token_weight(len(branch.trained)) * share,
                    columns={name: values[part] for name, values in kept.items()},
                )
                found.append(sequence)
        return found

    def _kept(self, columns: Columns) -> Columns:
        """The columns that the loss gets: in one pass the old log-probs are the forward's own, so the ratio is 1."""
        if self._algorithm.passes.several:
            return columns
        return {name: values for name, values in columns.items() if name != OLD_LOG_PROBS}


def _with_end(read: Sequence) -> Sequence:
    """Reads one token further than is trained: which token would follow the end does not matter to its value."""
    tokens, trained, log_probs = read.tokens, read.trained, read.engine_log_probs
    return Sequence(
        [*tokens, 0],
        [*trained, len(tokens)],
        [*log_probs, math.nan],
        routes=read.routes,
        images=read.images,
        temperatures=[*read.temperatures, *read.temperatures[-1:]],
    )


def unfit(state: steps.StepState, group: Group, limit: int) -> GroupRecord | None:
    """The record of a group that must not be accumulated; `limit` is max_staleness."""
    if problem := state.suspects.get(group.digest) or group.problem():
        return refused(group, Disposition.NONFINITE, problem)
    try:
        lag = steps.staleness(state, {number for m in group.members for number in m.versions})
    except Refusal as refusal:
        return refused(group, Disposition.STALE, refusal.message)
    if lag > limit:
        detail = f"the oldest segment lags {lag} steps behind the base; max_staleness is {limit}"
        return refused(group, Disposition.STALE, detail)
    if lag and (member := _untold(group, steps.held_version(state).number)) is not None:
        detail = (
            f"sample {member.sample_index} has a token of an older version whose log-prob the engine did not tell: "
            "nothing could correct for it"
        )
        return refused(group, Disposition.STALE, detail)
    return None


def _untold(group: Group, base: int) -> Member | None:
    """A member with a token of another version, and no log-prob of it; an episode's are compared by unit."""
    for member in group.members:
        for branch in member.branches:
            told = zip(branch.versions, branch.log_probs, strict=True)
            if any(version != base and math.isnan(value) for version, value in told):
                return member
    return None


def refused(group: Group, disposition: Disposition, detail: str) -> GroupRecord:
    """The record of a group that is not learned from, and why."""
    return GroupRecord(group.prompt_ordinal, group.digest, tuple(group.keys()), disposition, detail)


def not_finite(record: GroupRecord, what: str = "loss") -> GroupRecord:
    """The record of a group whose loss or gradient is not finite."""
    detail = f"the {what} is not finite under the current weights"
    return GroupRecord(record.prompt_ordinal, record.digest, record.keys, Disposition.NONFINITE, detail)


def _tokens(branches: Many[Branch]) -> int:
    return sum(len(branch.trained) for branch in branches)


def _longest_turn(member: Member) -> int:
    """Tokens of the longest piece that was sampled at once: `sampling.max_new_tokens` is each turn's limit."""
    longest = 0
    for positions in (branch.trained for branch in member.branches):
        length = 0
        for index, position in enumerate(positions):
            length = length + 1 if index and position == positions[index - 1] + 1 else 1
            longest = max(longest, length)
    return longest


def _mean(values: list[float]) -> float:
    """0 for a member that carries no loss."""
    return sum(values) / len(values) if values else 0.0


def admitted(
    state: steps.StepState, groups: Many[Group], max_staleness: int
) -> tuple[steps.StepState, list[Group]]:
    """The state after the groups that need not be learned, and those that are learned, by prompt.

    Raises Refusal CONFLICT.
    """
    fresh: list[Group] = []
    for group in sorted(groups, key=lambda group: group.prompt_ordinal):
        record = steps.known(state, group) or unfit(state, group, max_staleness)
        if record is None:
            fresh.append(group)
        else:
            state = steps.learned(state, record)
    return state, fresh
