"""Tells a run's user of a step that stands still for many times as long as its stage takes, and who is awaited.

A step without progress for `limits.step_timeout_s` ends; all else is for deadlines and leases to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace_servicekit.causes import cause_first

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED, DROPPED, FINISHED
from headrace_coordinator.domain.runs import STALLED
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.waits import WaitTimeout

T = TypeVar("T")
FACTOR = 10.0
"""Multiple of a stage's predicted (or last) seconds without progress after which it counts as standing still."""
LEAST_S = 20.0
UNKNOWN_S = 300.0
"""Where nothing was predicted or measured yet: engines load and compile."""
LOOK_S = 5.0


async def while_it_progresses(context: RunContext, step: Coroutine[Any, Any, T]) -> T:
    """Runs a step, however long it takes; raises `WaitTimeout` when it makes no progress for step_timeout_s."""
    task, limit = asyncio.ensure_future(step), context.spec.limits.step_timeout_s
    standstill = Standstill(context)
    try:
        while True:
            before, left = context.state.ledger.progress, limit
            while left > 0 and not (await asyncio.wait({task}, timeout=min(left, LOOK_S)))[0]:
                left -= LOOK_S
                standstill.look()
            if task.done():
                return task.result()
            if context.state.ledger.progress == before:
                what = f"step {context.state.ledger.step + 1} made no progress for {limit:.0f} s"
                raise WaitTimeout(cause_first(standstill.cause(), what, "limits.step_timeout_s"))
    finally:
        standstill.end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Standstill:
    """Watches the step in hand: `look` now and then."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._clock = context.event_log.monotonic
        self._progress, self._since = self._mark(), self._clock()

    def look(self) -> None:
        """Warns of a standstill, once; takes the warning back when there is progress."""
        if (mark := self._mark()) != self._progress:
            self._progress, self._since = mark, self._clock()
            self.end()
            return
        stage, awaited = self._awaited()
        expected, waited = self._expected(stage), self._clock() - self._since
        if STALLED in self._context.state.warnings or waited < self._limit(expected):
            return
        usual = f", {waited / expected:.0f} times as long as that takes" if expected else ""
        text = f"no progress for {waited:.0f} s in the stage {stage}{usual}: it waits for {awaited}"
        self._warn({STALLED: self._context.fleet.readable(text)})

    def cause(self) -> str:
        """What a standing step waits for: what is said of that, such as a scorer's error, else the instances."""
        waits, run = self._context.fleet.waits, self._context.run_id
        said = "; ".join([*waits.of(run), *waits.stages(run)])
        return said or f"it waits for {self._awaited()[1]}"

    def end(self) -> None:
        """The step goes on, or is over."""
        if STALLED in self._context.state.warnings:
            self._warn({})

    def _warn(self, found: dict[str, str]) -> None:
        kept = {key: text for key, text in self._context.state.warnings.items() if key != STALLED}
        context = self._context
        context.event_log.post(ev.Warned(run=context.run_id, warnings={**kept, **found}))

    def _mark(self) -> tuple[int, int]:
        ledger = self._context.state.ledger
        return ledger.step, ledger.progress

    def _limit(self, expected: float) -> float:
        return max(LEAST_S, FACTOR * expected) if expected else UNKNOWN_S

    def _expected(self, stage: str) -> float:
        """Seconds that the stage was predicted to take, else those of the last step; 0: unknown."""
        run = self._context.state
        predicted = run.plan.predicted_s if run.plan else {}
        measured = (run.totals.last_step or {}).get("stage_s", {})
        return float(predicted.get(stage) or measured.get(stage) or 0.0)

    def _awaited(self) -> tuple[str, str]:
        """The stage in hand, and the instances that the run waits for, with what it says that it waits for."""
        context, ledger = self._context, self._context.state.ledger
        index, workers = ledger.index, context.workers
        said = context.fleet.waits.of(context.run_id)
        made = all(slot.state in (FINISHED, ACCUMULATED, DROPPED) for slot in ledger.step_slots)
        if made and ledger.members(FINISHED):  # Whatever is made of the next steps meanwhile.
            stage, who = "score", [f"{worker.instance.instance} to score" for worker in workers.rewards]
        elif held := {who: len(keys) for who, keys in index.held.items() if keys}:
            stage, who = "generate", [f"{name} to finish {count} answers" for name, count in held.items()]
        elif index.waiting:
            stage, who = "generate", ["a rollout to take answers"]
        elif workers.trainers:
            stage, who = "learn", [f"{workers.leader.instance.instance} to learn"]
        else:
            stage, who = "learn", ["a trainer"]
        silent = [name for name in self._silent() if not any(name in text for text in who)]
        return stage, "; ".join([*who, *(f"{name}, which is silent" for name in silent), *said])

    def _silent(self) -> list[str]:
        """Instances of the run whose session is gone."""
        fleet, workers = self._context.fleet, self._context.workers
        own = (*workers.rollouts, *workers.trainers, *workers.rewards)
        return [worker.instance.instance for worker in own if not fleet.alive(worker.incarnation)]
