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
from typing import Any

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
from headrace_trainer.learning.passes import StepRounds
from headrace_trainer.learning.samples import (
    Columns,
    Disposition,
    Group,
    GroupRecord,
    Sample,
    Trajectory,
    Turn,
)


@dataclass(frozen=True)
class Prepared:
    """A group ready for its forward: `samples` is empty when its gradient is known to be zero."""

    record: GroupRecord
    samples: list[Sample]


class Intake:
    """What groups of one run are turned into."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm) -> None:
        self._config = config
        self._algorithm = algorithm

    def inferred(self, groups: Many[Group], rounds: StepRounds) -> list[Group]:
        """These groups, in order, with the algorithm's columns under the weights at which their step began.

        Called once for each group, when it arrives: so a streamed step stays streamed. There is no round where the
        algorithm needs no column.
        """
        if not (self._algorithm.columns and groups):
            return [*groups]
        bare = [self.bare(group) for group in groups]
        found = rounds.infer(bare, self._algorithm.columns)
        return [self._inferred(group, iter(own)) for group, own in zip(groups, found, strict=True)]

    def _inferred(self, group: Group, found: Iterator[Columns]) -> Group:
        members: list[Trajectory] = []
        for member in group.members:
            samples, following = list[Sample](), 0.0
            for sample in member.samples:
                if not sample.trained or self._hidden(member):
                    samples.append(sample)
                    continue
                read = next(found)
                if self.bootstraps(sample):
                    following = read[VALUES][-1]
                columns = {name: values[: len(sample.trained)] for name, values in read.items()}
                samples.append(msgspec.structs.replace(sample, columns=columns))
            members.append(replace(member, samples=tuple(samples), following=following))
        return replace(group, members=tuple(members))

    def prepare(self, state: steps.StepState, batch: Many[Group]) -> list[Prepared]:
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
        for group in batch:
            lengths = [_tokens(self.learned(member)) for member in group.members]
            own = [next(advantages)[:length] for length in lengths]
            targets = [next(returns)[:length] if returns else [] for length in lengths]
            needed = self._algorithm.every_token or any(any(each) for each in own)
            samples = self._ready(group, own, targets) if needed else []
            record = replace(self.record(state, group), advantages=tuple(map(_mean, own)))
            found.append(Prepared(record, samples))
        return found

    def record(self, state: steps.StepState, group: Group) -> GroupRecord:
        """The record of a group that is learned from."""
        learned = [self.learned(member) for member in group.members]
        lengths, shares = [*map(_tokens, learned)], [*map(self._share, learned)]
        by_version = Counter(version for own in learned for sample in own for version in sample.versions)
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

    def learned(self, member: Trajectory) -> list[Sample]:
        """Branches that carry loss: none of a masked answer, a baseline, or a cut one where those are masked."""
        return [] if self._hidden(member) else [sample for sample in member.samples if sample.trained]

    def _hidden(self, member: Trajectory) -> bool:
        cut = member.truncated and self._config.algorithm.truncated == "mask"
        return member.masked or self._is_baseline(member) or cut

    def _is_baseline(self, member: Trajectory) -> bool:
        return self._algorithm.greedy_first and member.sample_index == 0

    def _share(self, samples: Many[Sample]) -> float:
        """What each sample of a member weighs."""
        whole = any(sample.role for sample in samples) or branch_weights_of(self._algorithm) == "whole"
        return 1.0 if whole else 1.0 / max(1, len(samples))

    def _outcomes(self, state: steps.StepState, batch: Many[Group]) -> Outcomes:
        bootstraps = self._algorithm.critic is not None and self._algorithm.critic.bootstraps
        members = [(index, member) for index, group in enumerate(batch) for member in group.members]
        trained_B = torch.tensor([_tokens(self.learned(member)) for _, member in members])
        # Where no answer carries loss there is one place all the same: not every function takes tensors without any.
        places_T = torch.arange(max(1, int(trained_B.max())))
        return Outcomes(
            rewards_B=_double([member.reward for _, member in members]),
            groups_B=torch.tensor([index for index, _ in members]),
            mask_BT=places_T < trained_B[:, None],
            lengths_B=torch.tensor([_longest_turn(member) for _, member in members]),
            longest=self._config.sampling.longest_at(state.begun.step if state.begun else 0),
            draw=random.Random(
                f"{self._config.seed}/draw/{state.begun.step if state.begun else 0}"
            ).getrandbits(48),
            columns_BT=self._columns([member for _, member in members], places_T.numel()),
            bootstrap_values_B=_double([member.following for _, member in members]) if bootstraps else None,
            turns=self._turns([member for _, member in members]),
            greedy_B=torch.tensor([self._is_baseline(member) for _, member in members])
            if self._algorithm.greedy_first
            else None,
        )

    def _turns(self, members: Many[Trajectory]) -> Turns | None:
        """Where credit goes by turn, or by role."""
        credit = turn_credit_of(self._algorithm)
        if credit is None and not any(sample.role for member in members for sample in member.samples):
            return None
        return _turns_of(members, 1.0 if credit is None else credit.discount)

    def _columns(self, members: Many[Trajectory], longest: int) -> dict[str, Tensor]:
        """(B, T) by name, 0 where a trajectory has no token."""
        learned = [self.learned(member) for member in members]
        return {
            name: _double(
                [
                    _padded([value for sample in own for value in sample.columns.get(name, [])], longest)
                    for own in learned
                ]
            )
            for name in self._algorithm.columns
        }

    def bare(self, group: Group) -> list[Sample]:
        """Those of the group's samples that carry loss, as the infer pass reads them."""
        return [
            _with_end(sample) if self.bootstraps(sample) else _for_ranks(sample)
            for member in group.members
            for sample in self.learned(member)
        ]

    def bootstraps(self, sample: Sample) -> bool:
        """Whether the infer pass reads a sample to its end: its columns are one longer, by the value of the end."""
        critic = self._algorithm.critic
        return critic is not None and critic.bootstraps and sample.cut

    def _ready(self, group: Group, advantages: Many[list[float]], returns: Many[list[float]]) -> list[Sample]:
        """Those of the group's samples that carry loss, given the advantages and returns of every member."""
        found = []
        for member, own, more in zip(group.members, advantages, returns, strict=True):
            samples, end = self.learned(member), 0
            share = self._share(samples)
            for sample in samples:
                part = slice(end, end := end + len(sample.trained))
                given = {
                    "slot": (group.prompt_ordinal, member.sample_index),
                    "advantages": own[part],
                    "weight": self._algorithm.token_weight(len(sample.trained)) * share,
                    "columns": self._kept(sample.columns) | ({RETURNS: more[part]} if more else {}),
                }
                found.append(_for_ranks(sample, **given))
        return found

    def _kept(self, columns: Columns) -> Columns:
        """The columns that the loss gets: in one pass the old log-probs are the forward's own, so the ratio is 1."""
        if self._algorithm.passes.several:
            return columns
        return {name: values for name, values in columns.items() if name != OLD_LOG_PROBS}


def _for_ranks(sample: Sample, **given: Any) -> Sample:
    """Without what the leader alone needs."""
    return msgspec.structs.replace(sample, versions=[], turns=(), **given)


def _with_end(sample: Sample) -> Sample:
    """Reads one token further than is trained: which token would follow the end does not matter to its value."""
    return _for_ranks(
        sample,
        tokens=[*sample.tokens, 0],
        trained=[*sample.trained, len(sample.tokens)],
        engine_log_probs=[*sample.engine_log_probs, math.nan],
        temperatures=[*sample.temperatures, *sample.temperatures[-1:]],
    )


def columns_problem(group: Group) -> str:
    """What the infer pass found that is not finite; empty where all is."""
    for member in group.members:
        for sample in member.samples:
            for name, values in sample.columns.items():
                if not all(map(math.isfinite, values)):
                    return f"{name} column"
    return (
        ""
        if all(math.isfinite(member.following) for member in group.members)
        else "value of a cut answer's end"
    )


def unfit(state: steps.StepState, group: Group, limit: int) -> GroupRecord | None:
    """The record of a group that must not be accumulated; `limit` is max_staleness."""
    if problem := state.suspects.get(group.digest) or state.torn.get(group.digest) or group.problem():
        return steps.refused_group(group, Disposition.NONFINITE, problem)
    try:
        lag = steps.staleness(state, {number for m in group.members for number in m.versions})
    except Refusal as refusal:
        return steps.refused_group(group, Disposition.STALE, refusal.message)
    if lag > limit:
        detail = f"the oldest segment lags {lag} steps behind the base; max_staleness is {limit}"
        return steps.refused_group(group, Disposition.STALE, detail)
    if lag and (member := _untold(group, steps.held_version(state).number)) is not None:
        detail = (
            f"sample {member.sample_index} has a token of an older version whose log-prob the engine did not tell: "
            "nothing could correct for it"
        )
        return steps.refused_group(group, Disposition.STALE, detail)
    return None


def _untold(group: Group, base: int) -> Trajectory | None:
    """A member with a token of another version, and no log-prob of it; an episode's are compared by unit."""
    for member in group.members:
        for sample in member.samples:
            told = zip(sample.versions, sample.engine_log_probs, strict=True)
            if any(version != base and math.isnan(value) for version, value in told):
                return member
    return None


def _tokens(samples: Many[Sample]) -> int:
    return sum(len(sample.trained) for sample in samples)


def _longest_turn(member: Trajectory) -> int:
    """Tokens of the longest piece that was sampled at once: `sampling.max_new_tokens` is each turn's limit."""
    longest = 0
    for positions in (sample.trained for sample in member.samples):
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


def _padded(values: list[float], longest: int) -> list[float]:
    """With zeros behind them."""
    return values + [0.0] * (longest - len(values))


def _turns_of(members: Many[Trajectory], discount: float) -> Turns:
    """Of these members, in the order of their tokens; `discount` is of a reward from turn to turn."""
    turns = [member.turns for member in members]
    most = max(map(len, turns))
    tokens = [[turn.tokens for turn in own] + [0] * (most - len(own)) for own in turns]
    return Turns(
        rewards_BN=_double([_padded(_rewards(own, discount), most) for own in turns]),
        tokens_BN=torch.tensor(tokens),
        counts_B=torch.tensor([len(own) for own in turns]),
        **_roles(members, most),
    )


def _rewards(turns: Many[Turn], discount: float) -> list[float]:
    """Of each turn in the order of tokens, such that what is earned from a turn on is what is earned from then on.

    Branches stand behind each other, whichever turn came when; a role's turns are compared with its own alone.
    """
    rewards, places = [turn.reward for turn in turns], [turn.place for turn in turns]
    if places == sorted(places) or turns[0].role:
        return rewards
    following, returns = 0.0, [0.0] * len(turns)
    for turn in sorted(range(len(turns)), key=places.__getitem__, reverse=True):
        following = returns[turn] = rewards[turn] + discount * following
    return [now - discount * then for now, then in zip(returns, [*returns[1:], 0.0], strict=True)]


def _roles(members: Many[Trajectory], most: int) -> dict[str, Tensor]:
    """Who took each turn, and whose branch was cut; nothing where there are no roles."""
    rows = [[turn.role for turn in member.turns] for member in members]
    names = {role: number for number, role in enumerate(sorted({role for row in rows for role in row}))}
    if not any(names):
        return {}
    cut = [next((sample.role for sample in member.samples if sample.cut), None) for member in members]
    return {
        "roles_BN": torch.tensor([[*map(names.__getitem__, row), *[-1] * (most - len(row))] for row in rows]),
        "cut_roles_B": torch.tensor([-1 if role is None else names[role] for role in cut]),
    }


def _double(values: list[float] | list[list[float]]) -> Tensor:
    """In float64."""
    return torch.tensor(values, dtype=torch.float64)
