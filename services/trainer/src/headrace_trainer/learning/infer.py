"""The infer pass: what is computed of each trained token before its group is learned from. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from headrace_trainer.algorithms._base import VALUES, Algorithm
from headrace_trainer.learning.intake import Inferred, Intake
from headrace_trainer.learning.packing.work import StepRounds
from headrace_trainer.learning.samples import Columns, Group


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
            for group in groups:
                nothing = len(group.members)
                yield Inferred(group, ({},) * nothing, (0.0,) * nothing)
            return
        bare = [self._intake.bare(group) for group in groups]
        for group, found in zip(groups, self._rounds.infer(bare, self._names), strict=True):
            yield self._inferred(group, iter(found))

    def _inferred(self, group: Group, found: Iterator[Columns]) -> Inferred:
        columns: list[Columns] = []
        following: list[float] = []
        for member in group.members:
            own = next(found) if self._intake.trained(member) else {}
            following.append(own[VALUES][-1] if self._intake.bootstraps(member) else 0.0)
            if self._intake.bootstraps(member):
                own = {name: values[:-1] for name, values in own.items()}
            columns.append(own)
        return Inferred(group, tuple(columns), tuple(following))
