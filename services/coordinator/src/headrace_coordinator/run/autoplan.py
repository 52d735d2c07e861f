"""`placement.mode: auto`: measures the run's own steps, and says when the placement should change.

Which layout is faster is decided in `planner/choosing.py`, how devices change hands in `placement.py`.
"""

from __future__ import annotations

from collections import defaultdict

from headrace_schema.views import StepView

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.leases import is_gpu
from headrace_coordinator.domain.places import device_order, machines
from headrace_coordinator.planner.choosing import (
    Candidate,
    Layout,
    Shape,
    StepTime,
    candidates,
    choose,
    drifted,
    newest,
    typical,
)
from headrace_coordinator.run.context import RunContext

NO_WORK = ("checkpoint", "evaluate", "regroup")
"""Stages of a step's time that no placement changes."""
MEASURE_FIRST = ("collocated", "disaggregated")


class Autoplan:
    """The plan of one run at work. Without `auto` it never says anything."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._section = context.spec.placement
        self._tried: dict[Layout, list[StepTime]] = defaultdict(list)
        self._recent: list[StepTime] = []
        self._settling = True
        """The next step pays for a start or a change: it measures nothing."""

    def observe(self, view: StepView | None) -> None:
        """A step has ended; None: it was skipped."""
        if not self._window or view is None:
            return
        if self._settling:
            self._settling = False
            return
        seconds = view.stage_s
        time = StepTime(
            seconds.get("generate", 0.0),
            seconds.get("learn", 0.0),
            view.wall_s - sum(seconds.get(stage, 0.0) for stage in NO_WORK),
        )
        self._recent = newest([*self._recent, time], self._window) or [*self._recent, time]
        if len(self._tried[self._layout]) < self._window:
            self._tried[self._layout].append(time)

    def due(self) -> ev.PlanAdopted | None:
        """The plan to adopt, or to propose, before the next step; None: nothing changes."""
        if not self._window:
            return None
        plan = self._context.state.plan
        if plan is None or not plan.predicted_s:
            return self._measure()
        steps = newest(self._recent, self._window)
        if not drifted(plan.predicted_s["step"], steps):
            return None
        self._recent = []
        return self._replan(plan, typical(steps))

    def changed(self) -> None:
        """The devices have changed hands by a new plan."""
        self._settling, self._recent = True, []

    # --- which plan

    def _measure(self) -> ev.PlanAdopted | None:
        """The next mode to measure, or the choice once both are."""
        measured = {self._mode(layout) for layout, steps in self._tried.items() if len(steps) >= self._window}
        if obstacle := self._obstacle():
            return None if "collocated" not in measured else self._adopt(self._best(), obstacle)
        if len(measured) == len(MEASURE_FIRST):
            best = self._best()
            return self._adopt(best, f"{best.layout.words} is the fastest of what was measured or predicted")
        present = self._context.placement.section.mode
        missing = next(mode for mode in MEASURE_FIRST if mode not in measured)
        if present == missing:
            return None
        left = self._context.spec.steps - self._context.state.ledger.step
        if measured and left <= self._window + 1:
            return None  # No step would profit.
        return self._event(
            missing, [], [], f"measures {self._window} steps {missing}", predicted={}, alternatives={}
        )

    def _best(self) -> Candidate:
        return choose(self._candidates(), self._layout)

    def _candidates(self, now: tuple[Layout, StepTime] | None = None) -> list[Candidate]:
        tried = {layout: typical(steps) for layout, steps in self._tried.items() if steps}
        workers = self._context.workers
        fewest = (len(workers.rollouts), len(workers.trainers))
        return candidates(self._shape, len(self._devices) if self._divisible else 0, fewest, tried, now)

    def _replan(self, plan: ev.PlanAdopted, now: StepTime) -> ev.PlanAdopted | None:
        """After a drift: what is best today. What an earlier life of the coordinator measured is measured again."""
        percent = 100 * (now.step / plan.predicted_s["step"] - 1)
        words = f"steps take {now.step:.3g} s, {percent:+.0f}% of what was predicted"
        present = self._layout
        if not self._comparable(present):
            self._tried.clear()
            if self._obstacle() or self._section.replan != "auto":
                return self._adopt(Candidate(present, now, tried=True), f"{words}; the plan stays")
            return self._event(
                "collocated", [], [], f"{words}: measures again", predicted={}, alternatives={}
            )
        found = self._candidates((present, now))
        for one in found:
            if one.tried:  # From now on others are judged by what they would take today.
                self._tried[one.layout] = [one.time]
        self._tried[present] = [now]
        best = choose(found, present)
        if best.layout == present:
            return self._adopt(Candidate(present, now, tried=True), f"{words}; {present.words} stays best")
        event = self._adopt(best, f"{words}; {best.layout.words} would take {best.time.step:.3g} s")
        return event if self._section.replan == "auto" else _proposal(event)

    def _comparable(self, present: Layout) -> bool:
        """Whether steps of the present layout and of another one, and some in turns, were measured."""
        tried = [layout for layout, steps in self._tried.items() if steps]
        return present in tried and len(tried) > 1 and any(layout.in_turns for layout in tried)

    def _obstacle(self) -> str:
        """Why this run can only take turns; empty: it can generate and learn side by side."""
        workers = self._context.workers
        needed = len(workers.rollouts) + len(workers.trainers)
        if self._context.spec.deterministic:
            return "a deterministic run keeps one placement: collocated"
        if len(self._devices) < needed:
            return f"side by side needs {needed} devices and the run has {len(self._devices)}: collocated"
        return ""

    # --- what there is

    @property
    def _window(self) -> int:
        """Steps to measure in each mode; 0: this run keeps its placement."""
        spec = self._context.spec
        return 0 if spec.trainer.helpers else self._section.measured_steps(spec.steps)

    @property
    def _devices(self) -> list[str]:
        return sorted(self._context.workers.grant.devices, key=device_order)

    @property
    def _divisible(self) -> bool:
        """Whether devices can be divided freely: those of one machine, of which an instance can use several."""
        members = [*self._context.workers.rollouts, *self._context.workers.trainers]
        one = len(set(machines(member.instance for member in members).values())) == 1
        return one and not any(map(is_gpu, self._devices))

    @property
    def _layout(self) -> Layout:
        workers = self._context.workers
        generate, learn = (
            len({device for member in members for device in member.devices})
            for members in (workers.rollouts, workers.trainers)
        )
        return Layout(generate, learn, self._context.placement.in_turns)

    @property
    def _shape(self) -> Shape:
        spec = self._context.spec
        streams = not self._context.waits_for_batch and spec.placement.flow == "pipelined"
        return Shape(spec.algorithm.prompts_per_step, spec.algorithm.group_size, streams)

    def _mode(self, layout: Layout) -> str:
        return "collocated" if layout.in_turns else "disaggregated"

    def _adopt(self, best: Candidate, reason: str) -> ev.PlanAdopted:
        rollout: list[str] = []
        learn: list[str] = []
        if not best.layout.in_turns and self._divisible:
            devices = self._devices
            rollout, learn = devices[: best.layout.generate], devices[best.layout.generate :]
        time = best.time
        return self._event(
            self._mode(best.layout),
            rollout,
            learn,
            reason,
            predicted={"generate": time.generate, "learn": time.learn, "step": time.step},
            alternatives={
                one.layout.words: one.time.step for one in self._candidates() if one.layout != best.layout
            }
            if len(self._tried) > 1
            else {},
        )

    def _event(
        self,
        mode: str,
        rollout: list[str],
        learn: list[str],
        reason: str,
        *,
        predicted: dict[str, float],
        alternatives: dict[str, float],
    ) -> ev.PlanAdopted:
        return ev.PlanAdopted(
            at=self._context.event_log.now(),
            run=self._context.run_id,
            from_step=self._context.state.ledger.step,
            mode=mode,
            rollout=rollout,
            trainer=learn,
            reason=reason,
            predicted_s=predicted,
            alternatives=alternatives,
        )


def _proposal(plan: ev.PlanAdopted) -> ev.PlanProposed:
    return ev.PlanProposed(**{name: getattr(plan, name) for name in plan.__struct_fields__})
