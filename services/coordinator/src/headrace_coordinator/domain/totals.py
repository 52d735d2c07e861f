"""Running figures of one run: what its view shows without a walk over its history.

`Tally` recounts certificates slot by slot, without the ledger's counters: an independent check of G1 and G3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import expand, expand_drops
from headrace_coordinator.domain.ledger.slot_index import FILTERED

EVALUATIONS_SHOWN = 20
"""Evaluations in a run's view: the first one, and the newest others. The rest is read from the run's history."""


Counts = tuple[int, int, int, int, int, int]


class Shape(NamedTuple):
    """Slot ordinal that a run began with (above 0 for a fork), slots of a step and of a group."""

    first_slot: int
    slots_per_step: int
    group_size: int


class Tally(msgspec.Struct):
    """Counts over the steps of the live lineage, of which `steps` is the next."""

    steps: int = 0
    trained: int = 0
    dropped: int = 0
    duplicates: int = 0
    missing: int = 0
    max_staleness: int = 0
    filtered: int = 0
    """Those of `dropped` whose group the algorithm did not keep."""

    @property
    def counts(self) -> Counts:
        """All but `steps`, in order."""
        return (self.trained, self.dropped, self.duplicates, self.missing, self.max_staleness, self.filtered)

    def add(self, event: ev.StepCommitted | ev.StepSkipped, shape: Shape) -> None:
        """Counts a step's slots: a slot of another step, or one that comes twice, is a duplicate."""
        index, trained, dropped = step_index(event), step_trained(event), step_dropped(event)
        group_size, unseen = shape.group_size, (index - self.steps) * shape.slots_per_step
        counted = self.trained + self.dropped - self.duplicates + self.missing
        first, count = (
            shape.first_slot + counted + unseen,
            shape.slots_per_step + step_refilled(event) * group_size,
        )
        ordinals = [
            prompt * group_size + sample if sample < group_size else -1
            for prompt, sample, _ in (*trained, *dropped)
        ]
        own = {ordinal for ordinal in ordinals if first <= ordinal < first + count}
        self.filtered += sum(reason == FILTERED for _, _, reason in dropped)
        self.trained += len(trained)
        self.dropped += len(dropped)
        if index < self.steps:
            self.duplicates += len(ordinals)
        else:
            self.duplicates += len(ordinals) - len(own)
            self.missing += unseen + count - len(own)
            self.steps = index + 1
        if isinstance(event, ev.StepCommitted):
            self.max_staleness = max(self.max_staleness, event.certificate.max_staleness)


ENGINE_RESTARTS, ENGINE_ASLEEP = "engine_restarts", "engine_asleep_bytes"
"""Figures of a step that rollouts tell of their engines' processes."""


class Totals(msgspec.Struct):
    """The figures of a run's view."""

    tally: Tally = msgspec.field(default_factory=Tally)
    last_step: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = []
    judged: bool = False
    """Whether any committed step has an answer with a verdict."""
    scorer_failed: str = ""
    """What a scorer said of the first answer that it failed at."""
    engine_restarts: int = 0
    """How often rollouts started processes of their engines again, in committed steps, rewound ones too."""

    def apply(self, event: ev.Event, shape: Shape) -> None:
        """Folds one event of the run; events of other parts are ignored."""
        match event:
            case ev.StepCommitted(view=view):
                self.tally.add(event, shape)
                self.last_step = view
                self.judged = self.judged or view.get("reward_mean") is not None
                self.engine_restarts += int(view.get("figures", {}).get(ENGINE_RESTARTS, 0))
            case ev.ScorerFailed(detail=detail):
                self.scorer_failed = detail
            case ev.StepSkipped():
                self.tally.add(event, shape)
            case ev.Evaluated(view=view):
                self._evaluated(view)
            case ev.VersionRestored():
                self._rewind(event)

    def _evaluated(self, view: dict[str, Any]) -> None:
        if view["kind"] == "baseline_prefill":
            self.baseline = view
            return
        kind, step = view["kind"], view["step"]
        shown = [each for each in self.evaluations if (each["kind"], each["step"]) != (kind, step)] + [view]
        mine = [each for each in shown if each["kind"] == kind]
        if len(mine) > EVALUATIONS_SHOWN:  # The first one stays, to compare with.
            shown.remove(mine[1])
        self.evaluations = shown

    def _rewind(self, event: ev.VersionRestored) -> None:
        kept = event.kept or ev.Kept()
        self.tally = Tally(event.frontier_step, *kept.counts)
        self.last_step = kept.last_step
        self.evaluations = [view for view in self.evaluations if view["step"] <= event.ordinal]


def step_refilled(event: ev.StepCommitted | ev.StepSkipped) -> int:
    """Groups that the step took in place of dropped ones."""
    return event.certificate.refilled if isinstance(event, ev.StepCommitted) else event.refilled


def step_index(event: ev.StepCommitted | ev.StepSkipped) -> int:
    """The batch that a committed or skipped step used up."""
    return event.certificate.step if isinstance(event, ev.StepCommitted) else event.step


def step_trained(event: ev.StepCommitted | ev.StepSkipped) -> list[tuple[int, int, int]]:
    """(prompt, sample, attempt) of each slot that was trained."""
    return expand(event.certificate.trained) if isinstance(event, ev.StepCommitted) else []


def step_dropped(event: ev.StepCommitted | ev.StepSkipped) -> list[tuple[int, int, str]]:
    """(prompt, sample, reason) of each slot that was dropped."""
    return expand_drops(event.certificate.dropped if isinstance(event, ev.StepCommitted) else event.dropped)
