"""The infer pass: what is computed of each trained token before its group is learned from. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.learning.intake import Inferred, Intake
from headrace_trainer.learning.samples import Group
from headrace_trainer.learning.work import StepRounds


class InferPass:
    """Computes the algorithm's columns of groups, under the weights at which their step began.

    Called once for each group, when it arrives: so a streamed step stays streamed.
    """

    def __init__(self, algorithm: Algorithm, intake: Intake, rounds: StepRounds) -> None:
        self._names = algorithm.columns
        self._intake = intake
        self._rounds = rounds

    def __call__(self, groups: Many[Group]) -> Iterator[Inferred]:
        """These groups, in order, with their columns; without any round where the algorithm needs none."""
        if not (self._names and groups):
            yield from (Inferred(group, ({},) * len(group.members)) for group in groups)
            return
        bare = [self._intake.bare(group) for group in groups]
        for group, found in zip(groups, self._rounds.infer(bare, self._names), strict=True):
            columns = iter(found)
            members = group.members
            yield Inferred(group, tuple(next(columns) if self._intake.trained(m) else {} for m in members))
