"""`placement.mode: auto`: measures the run's own steps, and says when the placement should change.

The layouts that a run can use its devices in, and why it cannot use others, come first; they know no cost. Which layout
is faster is decided by headrace_planner's `placements.choosing`; devices change hands in `placement`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from headrace_planner.placements.choosing import Candidate, candidates, choose, drifted, newest
from headrace_planner.placements.layouts import (
    COLLOCATED,
    DISAGGREGATED,
    HYBRID,
    OFFLOADED,
    PIPELINED,
    RESIDENT,
    SEQUENTIAL,
    Layout,
    Shape,
    StepTime,
    Style,
    style_words,
    typical,
)
from headrace_planner.placements.trials import Trial, merged
from headrace_schema.resources.views import StepView

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.demand import devices_each
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.places import device_order, machines
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.timer import GENERATE_OPEN


class Layouts:
    """The layouts of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._spec = context.spec
        self._workers = context.workers
        self._ahead = context.spec.algorithm.max_staleness > 0
        """Whether answers are made ahead of the step that is learned, so that neither side waits for the other."""
        self._streams = not (context.spec.deterministic or context.spec.graph.whole_batch)
        """Whether a trainer beside the rollouts has anything to do before their answers are complete."""

    @property
    def devices(self) -> list[str]:
        """Devices of the run's grant, in order."""
        return sorted(self._workers.grant.devices, key=device_order)

    @property
    def _on_gpus(self) -> bool:
        return any(map(is_gpu, self._workers.grant.devices))

    @property
    def _one_machine(self) -> bool:
        workers = [*self._workers.rollouts, *self._workers.trainers]
        return len(set(machines(worker.instance for worker in workers).values())) == 1

    @property
    def divisible(self) -> bool:
        """Whether devices can be divided freely: those of one machine, of which an instance can use several."""
        return self._one_machine and not self._on_gpus

    @property
    def present(self) -> Layout:
        """How the run uses its devices now."""
        now = self._workers.placement
        generate, learn = (
            {device for worker in side for device in worker.devices}
            for side in (self._workers.rollouts, self._workers.trainers)
        )
        if now.joins:
            learn -= generate  # Which it has once the answers are complete.
        turns = RESIDENT if now.resident else OFFLOADED
        style = turns if now.turns else PIPELINED if now.streams else SEQUENTIAL
        return Layout(len(generate), len(learn), now.section.mode, style)

    @property
    def shape(self) -> Shape:
        """Groups of a step, their size, and whether they are learned from while others are generated."""
        algorithm = self._spec.algorithm
        streams = not self._context.waits_for_batch and self._spec.placement.pipelined
        return Shape(algorithm.prompts_per_step, algorithm.group_size, streams, self._ahead)

    @property
    def fewest(self) -> tuple[int, int]:
        """The least devices that generate, and that learn."""
        each = devices_each(self._spec, self.devices)
        return len(self._workers.rollouts) * each, len(self._workers.trainers)

    @property
    def obstacle(self) -> str:
        """Why this run can only take turns; empty where it can generate and learn side by side."""
        needed, there = sum(self.fewest), len(self.devices)
        if self._spec.deterministic:
            return "a deterministic run keeps one placement: collocated"
        few = f"side by side needs {needed} devices and the run has {there}: collocated"
        return few if there < needed else ""

    @property
    def measured_first(self) -> list[Style]:
        """Styles that a run measures before anything can be predicted: in turns, and side by side."""
        section = self._spec.placement
        apart = (DISAGGREGATED, PIPELINED if self._streams and section.pipelined else SEQUENTIAL)
        return [apart] if self._ahead else [(COLLOCATED, section.memory or OFFLOADED), apart]

    def executable(self) -> tuple[list[Style], Mapping[Style, str]]:
        """Styles that the run can be given, and of the others why not."""
        section, first = self._spec.placement, self.measured_first
        if self._spec.deterministic:
            return first[:1], {}
        # A style, whether spec and workflow leave it open, and what stands against it.
        table: list[tuple[Style, bool, dict[str, bool]]] = [
            (
                (COLLOCATED, RESIDENT),
                section.memory is None and not self._ahead,
                {"needs CPU slots": self._on_gpus},
            ),
            ((DISAGGREGATED, SEQUENTIAL), section.flow is None and self._streams and not self._ahead, {}),
            (
                (HYBRID, PIPELINED),
                True,
                {  # Sides that do not wait for each other leave hybrid little to lend.
                    "is not tried with max_staleness": self._ahead,
                    "needs CPU slots": self._on_gpus,
                    "needs trainer.ranks: 1": self._workers.ranks > 1,
                    "needs all devices on one machine": not self._one_machine,
                    "needs a trainer that works beside generation": not (self._streams and section.pipelined),
                },
            ),
        ]
        against = {
            style: [why for why, so in whys.items() if so] for style, is_open, whys in table if is_open
        }
        found = [style for style, whys in against.items() if not whys]
        return [*first, *found], {style: whys[0] for style, whys in against.items() if whys}


NO_WORK = ("checkpoint", "evaluate", "regroup")
"""Stages of a step's time that no placement changes."""
SHOWN = 3
"""Candidates that a reason names."""
TRIES = 3
"""Placements that are measured because they promise more than the first ones."""


class Autoplan:
    """The plan of one run at work. Without `auto` it never proposes one."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._section = context.spec.placement
        self._layouts = Layouts(context)
        self._trial = Trial(self._window)
        self._known: dict[Layout, StepTime] = {}
        """What earlier trials measured, at the speed that the machine had then."""
        self._asked: Layout | None = None
        """A measured layout that was asked for again."""
        self._recent: list[StepTime] = []
        self._ahead = context.spec.algorithm.max_staleness
        self._settling = 1 + self._ahead
        """So many of the next steps include a start or a change, or fill up what is open: they are not measured."""
        self._attempted: set[Layout] = set()
        """Layouts that were tried, or were to be and could not be made: they are not tried again."""
        self._moved_s = 0.0

    def observe(self, view: StepView | None, learned_after_s: float = 0.0) -> None:
        """Takes the times of an ended step; None: it was skipped. `learned_after_s`: learning after the last answer."""
        moved_s, self._moved_s = self._moved_s, self._context.leases.moved_s
        if not self._window or view is None:
            return
        if self._settling:
            self._settling -= 1
            return
        time = _time(view, learned_after_s, self._moved_s - moved_s)
        self._recent = newest([*self._recent, time], self._window) or [*self._recent, time]
        if not self._chosen:
            self._trial.add(self._layouts.present, time)

    def due(self) -> ev.PlanAdopted | None:
        """The plan to adopt, or to propose, before the next step; None: keep the present one."""
        if not self._window:
            return None
        plan = self._context.state.plan
        if plan is None or not self._chosen:
            return self._measure()
        steps = newest(self._recent, self._window)
        if not drifted(plan.predicted_s["step"], steps):
            return None
        self._recent = []
        return self._replan(plan, typical(steps))

    def due_move(self) -> ev.PlanAdopted | None:
        """The plan for which devices are to change hands; adopts one that leaves them, and proposes, at once."""
        plan = self.due()
        if plan is None or self._moves(plan):
            return plan
        self._context.event_log.post(plan)
        self._context.note(f"plan: {plan.reason}", plain=True)
        return None

    def _moves(self, plan: ev.PlanAdopted) -> bool:
        now = self._context.workers.placement.section
        held = {device for worker in self._context.workers.rollouts for device in worker.devices}
        divided = {*plan.rollout} != held if plan.rollout else bool(now.rollout)
        changed = divided or plan.mode != now.mode or (plan.flow == SEQUENTIAL) == now.pipelined
        return changed and not isinstance(plan, ev.PlanProposed)

    def changed(self) -> None:
        """The devices were handed over for a new plan."""
        self._settling, self._recent = 1 + self._ahead, []

    # --- which plan

    def _measure(self) -> ev.PlanAdopted | None:
        """What to measure next, or the choice once all promising layouts were measured."""
        trial, present = self._trial, self._layouts.present
        if not trial.full(present):
            return None  # Its block is being measured.
        if self._asked not in (None, present):
            trial.drop(self._asked)  # The devices were divided in another way.
        self._asked = None
        whole = [(one.mode, one.style) for one in self._tried]
        obstacle = self._layouts.obstacle
        first = self._layouts.measured_first[: 1 if obstacle else None]
        if missing := next((style for style in first if style not in whole), None):
            words = f"measures steps {' '.join(missing)}"
            return self._event(Layout(0, 0, *missing), words, {}, {}) if self._worth_a_try else None
        following = trial.following() if self._worth_a_try else None
        if following is not None:
            return None if following == present else self._again(following)
        best = self._best()
        if not best.tried and self._worth_a_try and len(self._attempted) < TRIES:
            return self._try(best)
        if not best.tried:
            best = choose([one for one in self._candidates() if one.tried], present)
        reasons = obstacle, self._comparison(best), trial.words(best.layout)
        return self._adopt(best, "; ".join(filter(None, reasons)))

    def _again(self, layout: Layout) -> ev.PlanAdopted:
        self._asked = layout
        return self._event(layout, f"measures {layout.words} once more, by turns", {}, {})

    def _try(self, best: Candidate) -> ev.PlanAdopted:
        """Begins to compare the best layout that was measured with one that promises more."""
        self._attempted.add(best.layout)
        self._known = self._tried
        leader = choose([one for one in self._candidates() if one.tried])
        newest = self._trial.newest(leader.layout) or [leader.time]
        self._trial = Trial(self._window, leader.layout, newest)
        words = f"tries {best.layout.words}, which promises {best.time.step:.3g} s a step"
        return self._event(best.layout, words, {}, {})

    @property
    def _worth_a_try(self) -> bool:
        """Whether steps would be left that profit from measuring another layout."""
        return self._context.spec.steps - self._context.state.ledger.step > self._window + 1

    def _best(self) -> Candidate:
        return choose(self._candidates(), self._layouts.present)

    def _candidates(self, now: tuple[Layout, StepTime] | None = None) -> list[Candidate]:
        tried = self._tried
        styles, _ = self._layouts.executable()
        devices = len(self._layouts.devices) if self._layouts.divisible else 0
        found = candidates(self._layouts.shape, devices, self._layouts.fewest, styles, tried, now)
        return [one for one in found if one.tried or one.layout not in self._attempted]

    def _comparison(self, best: Candidate) -> str:
        """One line: the layout that is best, the next ones, and what is no candidate."""
        others = [one for one in self._candidates() if one.layout != best.layout][: SHOWN - 1]
        known = [
            f"{one.layout.words}: {one.time.step:.3g} s{'' if one.tried else ' predicted'}" for one in others
        ]
        _, why = self._layouts.executable()
        missing = [f"{style_words(*style)} {word}" for style, word in why.items()]
        first = f"{best.layout.words}: {best.time.step:.3g} s a step"
        return "; ".join([f"{first}, next {', '.join(known)}" if known else first, *missing])

    def _replan(self, plan: ev.PlanAdopted, now: StepTime) -> ev.PlanAdopted | None:
        """After a drift: what is best today. What an earlier life of the coordinator measured is measured again."""
        percent = 100 * (now.step / plan.predicted_s["step"] - 1)
        words = f"steps take {now.step:.3g} s, {percent:+.0f}% of what was predicted"
        present = self._layouts.present
        if not self._comparable(present):
            self._trial, self._known, self._attempted = Trial(self._window), {}, set()
            if self._layouts.obstacle or self._section.replan != "auto":
                return self._adopt(Candidate(present, now, tried=True), f"{words}; the plan stays")
            again = Layout(0, 0, *self._layouts.measured_first[0])
            return self._event(again, f"{words}: measures again", {}, {})
        found = self._candidates((present, now))
        # From now on others are judged by what they would take today.
        self._trial = Trial(self._window)
        self._known = {one.layout: one.time for one in found if one.tried} | {present: now}
        best = choose(found, present)
        if best.layout == present:
            return self._adopt(Candidate(present, now, tried=True), f"{words}; {present.words} stays best")
        event = self._adopt(best, f"{words}; {best.layout.words} would take {best.time.step:.3g} s")
        return event if self._section.replan == "auto" else ev.PlanProposed(**msgspec.structs.asdict(event))

    def _comparable(self, present: Layout) -> bool:
        """Whether steps of the present layout and of another one, and some in turns, were measured."""
        tried = list(self._tried)
        if self._ahead:
            return present in tried
        return present in tried and len(tried) > 1 and any(layout.in_turns for layout in tried)

    # --- what was measured

    @property
    def _tried(self) -> dict[Layout, StepTime]:
        """What was measured, as it would be at one speed of the machine."""
        return merged(self._known, self._trial.times())

    @property
    def _chosen(self) -> bool:
        """Whether a plan says what its steps take: one that is only to be measured does not."""
        plan = self._context.state.plan
        return plan is not None and bool(plan.predicted_s)

    @property
    def _window(self) -> int:
        """Steps to measure in each mode; 0: this run keeps its placement."""
        spec = self._context.spec
        return 0 if spec.trainer.helpers else self._section.measured_steps(spec.steps)

    def _adopt(self, best: Candidate, reason: str) -> ev.PlanAdopted:
        time = best.time
        others = {one.layout.words: one.time.step for one in self._candidates() if one.layout != best.layout}
        return self._event(
            best.layout,
            reason,
            {"generate": time.generate, "learn": time.learn, "step": time.step},
            others if self._ahead or len(self._tried) > 1 else {},
        )

    def _event(
        self, layout: Layout, reason: str, predicted: dict[str, float], alternatives: dict[str, float]
    ) -> ev.PlanAdopted:
        rollout: list[str] = []
        learn: list[str] = []
        if not layout.in_turns and layout.generate and self._layouts.divisible:
            devices = self._layouts.devices
            rollout, learn = devices[: layout.generate], devices[layout.generate :]
        return ev.PlanAdopted(
            at=self._context.event_log.now(),
            run=self._context.run_id,
            from_step=self._context.state.ledger.step,
            mode=layout.mode,
            flow="" if layout.in_turns else layout.style,
            memory=layout.style if layout.in_turns else "",
            rollout=rollout,
            trainer=learn,
            reason=reason,
            predicted_s=predicted,
            alternatives=alternatives,
        )


def _time(view: StepView, after_s: float, moved_s: float) -> StepTime:
    seconds = view.stage_s
    switch_s = seconds.get("switch", 0.0) + seconds.get("sync", 0.0)
    step_s = view.wall_s - sum(seconds.get(stage, 0.0) for stage in NO_WORK)
    # A placement has the devices while the last answers are scored, too.
    generate_s = view.figures.get(GENERATE_OPEN, seconds.get("generate", 0.0))
    learn_s = seconds.get("learn", 0.0)
    return StepTime(generate_s, learn_s, step_s, after_s, switch_s, min(moved_s, switch_s))
