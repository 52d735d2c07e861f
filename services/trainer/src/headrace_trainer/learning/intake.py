"""From a settled group to a record and sequences: what is refused, what carries loss, what advantages are made of.

Knows no rounds and no optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.algorithms._base import Algorithm, Outcomes
from headrace_trainer.errors import Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Member, Sequence


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

    def refusal(self, state: steps.StepState, group: Group) -> GroupRecord | None:
        """The record of a group that must not be accumulated."""
        if problem := state.suspects.get(group.digest) or group.problem():
            return refused(group, Disposition.NONFINITE, problem)
        try:
            lag = steps.staleness(state, {number for m in group.members for number in m.versions})
        except Refusal as refusal:
            return refused(group, Disposition.STALE, refusal.message)
        limit = self._config.algorithm.max_staleness
        if lag > limit:
            detail = f"the oldest segment lags {lag} steps behind the base; max_staleness is {limit}"
            return refused(group, Disposition.STALE, detail)
        return None

    def prepare(self, state: steps.StepState, groups: Many[Group]) -> list[Prepared]:
        """Groups whose advantages are computed together: each alone, or a step's whole batch."""
        members = [member for group in groups for member in group.members]
        advantages = iter(self._algorithm.advantages(self._outcomes(groups)).tolist())
        values = [next(advantages)[: len(self.trained(member))] for member in members]
        found = []
        for group in groups:
            own, values = values[: len(group.members)], values[len(group.members) :]
            needed = self._algorithm.every_token or any(any(each) for each in own)
            sequences = self.sequences(group, own) if needed else []
            record = replace(self.record(state, group), advantages=tuple(map(_mean, own)))
            found.append(Prepared(record, sequences))
        return found

    def record(self, state: steps.StepState, group: Group) -> GroupRecord:
        """The record of a group that is learned from."""
        lengths = [len(self.trained(member)) for member in group.members]
        by_version = Counter(
            version
            for member, length in zip(group.members, lengths, strict=True)
            for version in member.versions[:length]
        )
        rewards = tuple(member.reward for member in group.members)
        return GroupRecord(
            prompt_ordinal=group.prompt_ordinal,
            digest=group.digest,
            keys=tuple(group.keys()),
            disposition=Disposition.ACCUMULATED,
            sequences=len(group.members),
            trained_sequences=sum(1 for length in lengths if length),
            tokens=sum(lengths),
            staleness=steps.staleness(state, set(by_version)),
            all_equal=len(set(rewards)) == 1,
            tokens_by_version=by_version,
            rewards=rewards,
            answer_lengths=tuple(len(member.trained) for member in group.members),
        )

    def trained(self, member: Member) -> list[int]:
        """Positions that carry loss: none in a masked answer, or a truncated one where those are masked."""
        hidden = member.masked or (member.truncated and self._config.algorithm.truncated == "mask")
        return [] if hidden else member.trained

    def _outcomes(self, groups: Many[Group]) -> Outcomes:
        members = [(index, member) for index, group in enumerate(groups) for member in group.members]
        trained_B = torch.tensor([len(self.trained(member)) for _, member in members])
        places_T = torch.arange(int(trained_B.max()))
        return Outcomes(
            rewards_B=_double([member.reward for _, member in members]),
            groups_B=torch.tensor([index for index, _ in members]),
            mask_BT=places_T < trained_B[:, None],
            lengths_B=torch.tensor([len(member.trained) for _, member in members]),
            longest=self._config.sampling.max_new_tokens,
        )

    def sequences(self, group: Group, advantages: Many[list[float]]) -> list[Sequence]:
        """Those of the group's members that carry loss, with an entry of advantages for every member."""
        return [
            Sequence(
                member.tokens,
                positions,
                member.engine_log_probs,
                own,
                self._algorithm.token_weight(len(positions)),
            )
            for member, own in zip(group.members, advantages, strict=True)
            if (positions := self.trained(member))
        ]


def refused(group: Group, disposition: Disposition, detail: str) -> GroupRecord:
    """The record of a group that is not learned from, and why."""
    return GroupRecord(group.prompt_ordinal, group.digest, tuple(group.keys()), disposition, detail)


def not_finite(record: GroupRecord, what: str = "loss") -> GroupRecord:
    """The record of a group whose loss or gradient is not finite."""
    detail = f"the {what} is not finite under the current weights"
    return GroupRecord(record.prompt_ordinal, record.digest, record.keys, Disposition.NONFINITE, detail)


def _double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _mean(values: list[float]) -> float:
    """0 for a member that carries no loss."""
    return sum(values) / len(values) if values else 0.0
