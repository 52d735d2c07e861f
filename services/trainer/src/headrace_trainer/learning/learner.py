"""From settled groups to rounds, as they come: packs, accumulates, and tells what became of each group.

Runs on the leader. Knows no wire and no optimizer; the step's rules are `step`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.intake import Intake, Prepared
from headrace_trainer.learning.packing import plan_batches, plan_rows
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Rows

RunRound = Callable[[list[Rows]], bool]
"""Runs one micro round with an entry of work for each rank; whether it was finite everywhere."""
GradientHolds = Callable[[], bool]
"""Whether the accumulated gradient is finite; when it is not, the accumulators have been emptied."""


class Learner:
    """Accumulates groups of one run."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        world_size: int,
        *,
        shared: bool,
        run_round: RunRound,
        gradient_holds: GradientHolds,
    ) -> None:
        self._config = config
        self._intake = Intake(config, algorithm)
        self._world_size = world_size
        self._shared = shared
        self._run_round = run_round
        self._gradient_holds = gradient_holds

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        fresh: dict[int, Prepared] = {}
        for group in sorted(groups, key=lambda group: group.prompt_ordinal):
            record = steps.known(state, group) or self._intake.refusal(state, group)
            if record is None:
                [fresh[group.prompt_ordinal]] = self._intake.prepare(state, [group])
            else:
                state = steps.learned(state, record)
        alone = [[prepared] for prepared in fresh.values()]
        # One packing a group, whatever else has arrived, is what makes two runs equal; and finds a culprit.
        apart = self._config.deterministic or state.careful
        for batch in alone if apart else [list(fresh.values())]:
            state = self._accumulate(state, batch)
            if state.careful and not self._gradient_holds():
                state = _quarantined(state, batch[0].record)
        return state

    def _accumulate(self, state: steps.StepState, batch: list[Prepared]) -> steps.StepState:
        """Learns a batch of groups; those in a non-finite round are tried again, each alone."""
        inside, outside = self._rounds(batch)
        for index, prepared in enumerate(batch):
            if index not in outside:
                state = steps.learned(state, prepared.record)
            elif len(batch) == 1 or index in inside:
                state = steps.learned(
                    state, _nonfinite(prepared.record), taint=_taint(index in inside, prepared)
                )
            else:
                state = self._accumulate(state, [prepared])
        return state

    def _rounds(self, batch: list[Prepared]) -> tuple[set[int], set[int]]:
        """Runs the batch; which groups have rows inside the accumulators, and which have rows left outside."""
        budget = self._config.trainer.micro_batch_tokens
        rows = [
            (owner, length, [prepared.sequences[index] for index in members])
            for owner, prepared in enumerate(batch)
            for length, members in plan_rows(prepared.sequences, budget, shared=self._shared)
        ]
        batches = plan_batches([length for _, length, _ in rows], budget)
        inside: set[int] = set()
        outside: set[int] = set()
        for first in range(0, len(batches), self._world_size):
            chosen = batches[first : first + self._world_size]
            work: list[Rows] = [[rows[row][2] for row in micro] for micro in chosen]
            work += [[] for _ in range(self._world_size - len(work))]
            owners = {rows[row][0] for micro in chosen for row in micro}
            (inside if self._run_round(work) else outside).update(owners)
        return inside, outside


def _nonfinite(record: GroupRecord, what: str = "loss") -> GroupRecord:
    detail = f"the {what} is not finite under the current weights"
    return GroupRecord(record.prompt_ordinal, record.digest, record.keys, Disposition.NONFINITE, detail)


def _quarantined(state: steps.StepState, record: GroupRecord) -> steps.StepState:
    """Without the group, and without hope for the attempt: what the others had accumulated went with it."""
    taint = f"prompt {record.prompt_ordinal} has a gradient that is not finite"
    return steps.learned(state, _nonfinite(record, "gradient"), taint=taint)


def _taint(partly_inside: bool, prepared: Prepared) -> str:
    """Why the attempt cannot be committed when a part of a refused group is already accumulated."""
    ordinal = prepared.record.prompt_ordinal
    return (
        f"prompt {ordinal} was found not finite after a part of it was accumulated" if partly_inside else ""
    )
