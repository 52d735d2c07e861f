"""Chooses a run's placement from steps that it has made: what was measured decides, and costs predict the rest.

Knows no run, no fleet and no clock: numbers in, candidates out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from headrace_coordinator.planner.costs import DeviceKind
from headrace_coordinator.planner.graph import Edge, Granularity, Workflow
from headrace_coordinator.planner.planning import predict
from headrace_coordinator.planner.profiles import Profile
from headrace_coordinator.planner.search import MAX_CHUNKS
from headrace_coordinator.planner.tree import Leaf, Node, Share, Split

KIND = "device"
UNTRIED_GAIN = 0.05
"""A placement that was never measured must promise so much more than the best that was."""
STAY_GAIN = 0.03
"""And any other so much more than the present one."""
DRIFT = 0.3
"""A step that lastingly takes so much longer or shorter than predicted calls for a new look."""
SUSTAINED_S = 5.0
"""Lastingly: over steps of so many seconds together. A single step of a tenth of a second says little."""
MOST = 0.8
"""Share of these steps that must take so much longer, or shorter."""

TICK = 1e-6
"""Seconds of work that was too short to measure."""


@dataclass(frozen=True)
class Layout:
    """How many devices generate and how many learn: the same ones in turns, or others side by side."""

    generate: int
    learn: int
    in_turns: bool

    @property
    def words(self) -> str:
        """For people."""
        if self.in_turns:
            return f"collocated on {self.generate}"
        return f"disaggregated, {self.generate} generate and {self.learn} learn"


@dataclass(frozen=True)
class StepTime:
    """One measured step: seconds of its stages' work, and of all of it."""

    generate: float
    learn: float
    step: float


@dataclass(frozen=True)
class Shape:
    """What a step is: its groups, and whether they are learned from one by one as they settle."""

    groups: int
    group_size: int
    streams: bool

    @property
    def items(self) -> int:
        """Trajectories of a step."""
        return self.groups * self.group_size


@dataclass(frozen=True)
class Candidate:
    """A layout and what a step takes with it."""

    layout: Layout
    time: StepTime
    tried: bool


def typical(steps: Sequence[StepTime]) -> StepTime:
    """Medians of measured steps."""
    return StepTime(
        *(median(getattr(step, name) for step in steps) for name in ("generate", "learn", "step"))
    )


def candidates(
    shape: Shape,
    devices: int,
    fewest: tuple[int, int],
    tried: Mapping[Layout, StepTime],
    now: tuple[Layout, StepTime] | None = None,
) -> list[Candidate]:
    """Layouts of `devices`, the fastest first.

    `fewest`: devices that generating and learning need. `tried`: typical steps, one of them in turns. `now`: how a
    tried layout does today; the stages of all others are taken to have changed as its have.
    """
    work = _Work(shape, tried, now)
    found = [Candidate(layout, work.time(layout), True) for layout in tried]
    learns = range(fewest[1], devices - fewest[0] + 1)
    splits = [Layout(devices - learn, learn, in_turns=False) for learn in learns]
    if any(not layout.in_turns for layout in tried):  # Or nothing is known of fewer devices than all.
        found += [Candidate(layout, work.time(layout), False) for layout in splits if layout not in tried]
    return sorted(found, key=lambda candidate: candidate.time.step)


def choose(found: Sequence[Candidate], present: Layout | None = None) -> Candidate:
    """The candidate to go on with, of some of which at least one was tried."""
    best = min((one for one in found if one.tried), key=lambda one: one.time.step)
    for one in found:
        if not one.tried and one.time.step < (1 - UNTRIED_GAIN) * best.time.step:
            best = one
            break
    stays = next((one for one in found if one.layout == present), None)
    return stays if stays and best.time.step > (1 - STAY_GAIN) * stays.time.step else best


def newest(steps: Sequence[StepTime], fewest: int) -> list[StepTime]:
    """The newest steps that say something: at least `fewest`, and SUSTAINED_S seconds of them; empty when too few."""
    seconds = 0.0
    for count, step in enumerate(reversed(steps), 1):
        seconds += step.step
        if count >= fewest and seconds >= SUSTAINED_S:
            return list(steps[len(steps) - count :])
    return []


def drifted(predicted: float, steps: Sequence[StepTime]) -> bool:
    """Whether most of some steps take longer, or most shorter, than was predicted."""
    ratios = sorted(step.step / predicted for step in steps)
    needed = math.ceil(MOST * len(ratios))
    return bool(ratios) and (ratios[-needed] > 1 + DRIFT or ratios[needed - 1] < 1 / (1 + DRIFT))


class _Work:
    """Seconds of a step by layout, from those that were tried."""

    def __init__(
        self, shape: Shape, tried: Mapping[Layout, StepTime], now: tuple[Layout, StepTime] | None
    ) -> None:
        self._shape = shape
        self._tried = tried
        self._change = (1.0, 1.0)
        if now is not None:
            before, after = tried[now[0]], now[1]
            self._change = (
                max(after.generate, TICK) / max(before.generate, TICK),
                max(after.learn, TICK) / max(before.learn, TICK),
            )

    def time(self, layout: Layout) -> StepTime:
        generate, learn = self._stages(layout)
        changed = StepTime(generate * self._change[0], learn * self._change[1], 0.0)
        return replace(changed, step=self._model(layout, changed) + self._beyond(layout))

    def _stages(self, layout: Layout) -> tuple[float, float]:
        if found := self._tried.get(layout):
            return found.generate, found.learn
        generated = {one.generate: time.generate for one, time in self._tried.items()}
        learned = {one.learn: time.learn for one, time in self._tried.items()}
        return _scaled(generated, layout.generate), _scaled(learned, layout.learn)

    def _model(self, layout: Layout, time: StepTime) -> float:
        """What the planner's costs say of a step whose stages take so long."""
        items, group = self._shape.items, self._shape.group_size
        generate, learn = Leaf("generate", KIND, layout.generate), Leaf("learn", KIND, layout.learn)
        granularity = Granularity.GROUP if self._shape.streams else Granularity.BATCH
        workflow = Workflow(
            "reasoning", ("generate", "learn"), (Edge("generate", "learn", granularity),), group_size=group
        )
        chunks = min(MAX_CHUNKS, self._shape.groups) if self._shape.streams else 1
        tree: Node = (
            Share((generate, learn), resident=True) if layout.in_turns else Split(generate, learn, chunks)
        )
        profiles = [
            _profile(leaf, items, seconds)
            for leaf, seconds in ((generate, time.generate), (learn, time.learn))
        ]
        sides = (layout.generate, layout.learn)
        count = max(sides) if layout.in_turns else sum(sides)
        return predict(tree, workflow, profiles, {KIND: DeviceKind(count)}, items)

    def _beyond(self, layout: Layout) -> float:
        """Seconds of a measured step that the costs do not explain: switching, weights, messages, contention."""
        alike = self._tried.get(layout)
        if alike is None:
            layout, alike = next(
                (one, time) for one, time in self._tried.items() if one.in_turns == layout.in_turns
            )
        return alike.step - self._model(layout, alike)


def _profile(leaf: Leaf, items: int, seconds: float) -> Profile:
    plain = Profile(leaf.stage, leaf.kind, item_s=1.0, replica_devices=leaf.devices)
    return plain.measured_as(max(seconds, TICK), items, leaf.devices)


def _scaled(known: Mapping[int, float], devices: int) -> float:
    """Seconds on so many devices, by the power law through the nearest two that are known."""
    if devices in known:
        return known[devices]
    low, high = sorted(sorted(known, key=lambda count: abs(math.log(count / devices)))[:2])
    power = math.log(max(known[high], TICK) / max(known[low], TICK)) / math.log(high / low)
    return float(known[low] * (devices / low) ** min(0.0, max(-1.0, power)))
