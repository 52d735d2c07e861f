"""The lives of a step's slowest trajectories as spans of its trace: generated, scored, learned. Reads events alone."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from headrace_servicekit.tracing import record

from headrace_coordinator.domain import events as ev

MOST_SPANS = 256
"""Most spans of one step: more cannot be told apart."""
SPANS_A_SECOND = 50.0
"""Most spans per second of a step. A span costs 0.2 ms of a core with the collector's work: a hundredth in all."""


class _Life(msgspec.Struct):
    holder: str
    assigned: float
    finished: float = 0.0
    tokens: int = 0
    settled: float = 0.0


class TrajectorySpans:
    """Gathers the times of open steps' trajectories, and records the longest that a committed step was trained on."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, dict[int, _Life]]] = defaultdict(lambda: defaultdict(dict))
        """By run, prompt and sample."""
        self._learned: dict[str, dict[int, float]] = defaultdict(dict)

    def observe(self, event: ev.Event) -> None:
        """Takes an event, in the task that posts it: a committed step's is inside the step's trace."""
        match event:
            case ev.SlotsAssigned():
                for prompt, sample, _, holder in event.slots:
                    self._runs[event.run][prompt][sample] = _Life(holder, event.at)
            case ev.SlotsFinished():
                for prompt, sample, _, _, tokens in event.slots:
                    if life := self._runs[event.run][prompt].get(sample):
                        life.finished, life.tokens = event.at, tokens
            case ev.GroupsSettled():
                for prompt, _ in event.groups:
                    for life in self._runs[event.run][prompt].values():
                        life.settled = event.at
            case ev.GroupsAccumulated():
                self._learned[event.run] |= dict.fromkeys(event.prompts, event.at)
            case ev.GroupDropped():
                self._runs[event.run].pop(event.prompt, None)
            case ev.StepCommitted():
                self._record(event)
            case ev.StepAborted():
                self._learned.pop(event.run, None)
            case ev.RunReleased():
                self._learned.pop(event.run, None)
                self._runs.pop(event.run, None)

    def _record(self, event: ev.StepCommitted) -> None:
        learned = self._learned.pop(event.run, {})
        lives = [
            (at, prompt, sample, life)
            for prompt, at in learned.items()
            for sample, life in self._runs[event.run].pop(prompt, {}).items()
        ]
        if not lives:
            return
        lives.sort(key=lambda each: (each[3].assigned - each[0], each[1], each[2]))
        took = event.at - min(life.assigned for *_, life in lives)
        for at, prompt, sample, life in lives[: min(MOST_SPANS, 1 + int(SPANS_A_SECOND * took))]:
            times = [("finished", life.finished), ("settled", life.settled), ("learned", at)]
            slot = f"{prompt}/{sample}"
            record("trajectory", life.assigned, at, times, slot=slot, tokens=life.tokens, holder=life.holder)
