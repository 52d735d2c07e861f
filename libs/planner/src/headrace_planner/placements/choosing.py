"""Chooses a run's placement from steps that it has made: what was measured decides, and costs predict the rest.

Knows no run, no fleet and no clock: numbers in, candidates out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_planner.graph import Edge, Granularity, Workflow
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
)
from headrace_planner.planning import predict
from headrace_planner.profiling.profiles import Profile
from headrace_planner.trees.costs import DeviceKind
from headrace_planner.trees.search import MAX_CHUNKS
from headrace_planner.trees.tree import Leaf, Node, Share, Split

KIND = "device"
TICK = 1e-6
"""Seconds of work that was too short to measure."""
UNTRIED_GAIN = 0.05
"""Share of a step's time that an untried placement must promise to save over the best measured one."""
STAY_GAIN = 0.03
"""Share of a step's time that any other placement must save over the present one."""
DRIFT = 0.3
"""Placements are compared again when steps deviate from the prediction by more than this share, over SUSTAINED_S."""
SUSTAINED_S = 5.0
"""Seconds of steps together that must deviate: a single step of a tenth of a second says little."""
MOST = 0.8
"""Share of these steps that must take longer than predicted, or shorter, by DRIFT."""


class StepCosts:
    """Seconds of a step by layout: measured where the layout was tried, else from the steps of tried layouts.

    - *Resident* is offloaded without the seconds in which memory moved.
    - *Sequential* is pipelined with its stages one after the other. Beside each other they contend for memory and
      caches: alone, on fewer devices, a stage takes in proportion longer at most than it took on all in turns, and what
      a pipelined step took beyond that is due to the other stage.
    - *Hybrid* is pipelined, where what is learned after the last answer goes as fast as in turns on all devices, and
      devices change hands as in turns that stay loaded.
    - *Another division* of devices takes what the planner's costs say of the stages' seconds, which follow the power
      law through two numbers of devices, and what the measured division took beyond these costs.
    - *Ahead* (`max_staleness` above 0) a step costs its slower side alone. As long as one number of devices is known, a
      stage is taken to be as fast as it has devices.
    """

    def __init__(
        self,
        shape: Shape,
        tried: Mapping[Layout, StepTime],
        now: tuple[Layout, StepTime] | None = None,
    ) -> None:
        self._shape = shape
        change = (1.0, 1.0)
        if now is not None:
            before, after = tried[now[0]], now[1]
            change = (
                max(after.generate, TICK) / max(before.generate, TICK),
                max(after.learn, TICK) / max(before.learn, TICK),
            )
        self._tried = {layout: self._changed(layout, time, change) for layout, time in tried.items()}

    def time(self, layout: Layout) -> StepTime:
        """What a step takes with a layout that was tried."""
        return self._tried[layout]

    def predicted(self, layout: Layout) -> StepTime | None:
        """What a step would take with an untried layout; None where no tried layout allows a prediction."""
        if layout.mode == COLLOCATED:
            return self._resident(layout) if layout.style == RESIDENT else None
        if layout.mode == HYBRID:
            return self._hybrid(layout)
        if layout.style == SEQUENTIAL and (found := self._sequential(layout)) is not None:
            return found
        return self._divided(layout)

    def _changed(self, layout: Layout, time: StepTime, change: tuple[float, float]) -> StepTime:
        """What a step would take with a tried layout if its stages took `change` times as long."""
        if change == (1.0, 1.0):
            return time
        made = replace(
            time,
            generate=time.generate * change[0],
            learn=time.learn * change[1],
            after=time.after * change[1],
        )
        if layout.mode == DISAGGREGATED and (layout.style == PIPELINED or self._shape.ahead):
            more = self._model(layout, made) - self._model(layout, time)
        else:
            beside = time.after if layout.mode == HYBRID else time.learn
            more = made.generate - time.generate + beside * (change[1] - 1)
        return replace(made, step=max(TICK, time.step + more))

    def _resident(self, layout: Layout) -> StepTime | None:
        loaded = self._tried.get(replace(layout, style=OFFLOADED))
        if loaded is None:
            return None
        switch = max(0.0, loaded.switch - loaded.moved)
        return replace(loaded, step=max(TICK, loaded.step - loaded.moved), switch=switch, moved=0.0)

    def _sequential(self, layout: Layout) -> StepTime | None:
        beside = self._tried.get(replace(layout, mode=DISAGGREGATED, style=PIPELINED))
        if beside is None:
            return None
        generate, learn = beside.generate, beside.learn
        for turns, time in self._in_turns():
            generate = min(generate, time.generate * max(1.0, turns.generate / layout.generate))
            learn = min(learn, time.learn * max(1.0, turns.learn / layout.learn))
        step = generate + learn + beside.rest
        return replace(beside, generate=generate, learn=learn, after=learn, step=step)

    def _hybrid(self, layout: Layout) -> StepTime | None:
        apart = replace(layout, mode=DISAGGREGATED, style=PIPELINED)
        beside = self._tried.get(apart) or self._divided(apart)
        turns = next(((one, time) for one, time in self._in_turns() if one.learn == layout.all), None)
        if beside is None or turns is None:
            return None
        faster = min(1.0, max(turns[1].learn, TICK) / max(beside.learn, TICK))
        after = beside.after * faster
        # Weights are published and installed in either; what turns that stay loaded take beyond it, a change of hands.
        hands = max(0.0, turns[1].switch - turns[1].moved - beside.switch)
        learn = beside.learn - beside.after + after
        step = beside.step - beside.after + after + hands
        return replace(beside, learn=learn, after=after, step=step, switch=beside.switch + hands)

    def _divided(self, layout: Layout) -> StepTime | None:
        """What a step would take with another division of the devices, from a tried layout of the same style."""
        style = (layout.mode, layout.style)
        known = next(
            ((one, time) for one, time in self._tried.items() if (one.mode, one.style) == style), None
        )
        if known is None:
            return None
        generated = {one.generate: time.generate for one, time in self._tried.items()}
        learned = {one.learn: time.learn for one, time in self._tried.items() if one.mode != HYBRID}
        alone = -1.0 if self._shape.ahead else 0.0
        time = StepTime(
            _scaled(generated, layout.generate, alone), _scaled(learned, layout.learn, alone), 0.0
        )
        step = self._model(layout, time) + known[1].step - self._model(*known)
        after = min(time.learn, max(0.0, step - known[1].rest - time.generate))
        return replace(time, step=max(TICK, step), after=after, switch=known[1].switch)

    def _in_turns(self) -> list[tuple[Layout, StepTime]]:
        """Tried layouts in turns, those that stay loaded first."""
        found = [(layout, time) for layout, time in self._tried.items() if layout.in_turns]
        return sorted(found, key=lambda pair: pair[0].style != RESIDENT)

    def _model(self, layout: Layout, time: StepTime) -> float:
        """Seconds that the planner predicts for a step whose stages take as long as `time` says."""
        if self._shape.ahead and not layout.in_turns:
            return max(time.generate, time.learn)
        items, group = self._shape.items, self._shape.group_size
        generate, learn = Leaf("generate", KIND, layout.generate), Leaf("learn", KIND, layout.learn)
        streams = self._shape.streams and layout.style == PIPELINED
        granularity = Granularity.GROUP if streams else Granularity.BATCH
        edges = (Edge("generate", "learn", granularity),)
        workflow = Workflow("reasoning", ("generate", "learn"), edges, group_size=group)
        chunks = min(MAX_CHUNKS, self._shape.groups) if streams else 1
        tree: Node = (
            Share((generate, learn), resident=True) if layout.in_turns else Split(generate, learn, chunks)
        )
        profiles = [
            _profile(leaf, items, seconds)
            for leaf, seconds in ((generate, time.generate), (learn, time.learn))
        ]
        return predict(tree, workflow, profiles, {KIND: DeviceKind(layout.all)}, items)


def _profile(leaf: Leaf, items: int, seconds: float) -> Profile:
    plain = Profile(leaf.stage, leaf.kind, item_s=1.0, replica_devices=leaf.devices)
    return plain.measured_as(max(seconds, TICK), items, leaf.devices)


def _scaled(known: Mapping[int, float], devices: int, alone: float) -> float:
    """Seconds on so many devices, by the power law through the nearest two that are known.

    `alone`: the power where one number is known. What it promises is tried before it is believed.
    """
    if devices in known:
        return known[devices]
    if len(known) == 1:
        ((count, seconds),) = known.items()
        return float(seconds * (devices / count) ** alone)
    low, high = sorted(sorted(known, key=lambda count: abs(math.log(count / devices)))[:2])
    power = math.log(max(known[high], TICK) / max(known[low], TICK)) / math.log(high / low)
    return float(known[low] * (devices / low) ** min(0.0, max(-1.0, power)))


@dataclass(frozen=True)
class Candidate:
    """A layout and what a step takes with it."""

    layout: Layout
    time: StepTime
    tried: bool


def candidates(
    shape: Shape,
    devices: int,
    fewest: tuple[int, int],
    styles: Sequence[Style],
    tried: Mapping[Layout, StepTime],
    now: tuple[Layout, StepTime] | None = None,
) -> list[Candidate]:
    """Layouts of `devices` in any of `styles`, the fastest first; 0 devices: divided as in what was tried.

    `fewest`: devices that generating and learning need. `tried`: typical steps by layout. `now`: a tried layout and its
    newest steps; the stages of all other layouts are assumed to have changed in the same proportion. Layouts that
    cannot be predicted are left out: layouts in turns need a tried one in turns, two sides need a pipelined step.
    """
    costs = StepCosts(shape, tried, now)
    found = [Candidate(layout, costs.time(layout), True) for layout in tried]
    for layout in dict.fromkeys(_layouts(devices, fewest, styles, list(tried))):
        if layout not in tried and (time := costs.predicted(layout)) is not None:
            found.append(Candidate(layout, time, False))
    return sorted(found, key=lambda candidate: candidate.time.step)


def _layouts(
    devices: int, fewest: tuple[int, int], styles: Sequence[Style], tried: Sequence[Layout]
) -> Iterator[Layout]:
    turns = [layout for layout in tried if layout.in_turns]
    splits = {(layout.generate, layout.learn) for layout in tried if not layout.in_turns}
    more = {(devices - learn, learn) for learn in range(fewest[1], devices - fewest[0] + 1)}
    for mode, style in styles:
        if mode == COLLOCATED:
            yield from (Layout(layout.generate, layout.learn, mode, style) for layout in turns)
        else:
            yield from (Layout(generate, learn, mode, style) for generate, learn in sorted(splits | more))


def choose(found: Sequence[Candidate], present: Layout | None = None) -> Candidate:
    """The candidate that the run should use next; at least one of `found` must have been tried."""
    best = min((one for one in found if one.tried), key=lambda one: one.time.step)
    for one in found:
        if not one.tried and (_lighter(one, best) or one.time.step < (1 - UNTRIED_GAIN) * best.time.step):
            best = one
            break
    stays = next((one for one in found if one.layout == present), None)
    if stays is None or _lighter(best, stays):
        return best
    return stays if best.time.step > (1 - STAY_GAIN) * stays.time.step else best


def _lighter(one: Candidate, other: Candidate) -> bool:
    """Whether `one` is untried and is `other` without moving memory: it is tried whatever is predicted for it."""
    same = one.layout == replace(other.layout, style=RESIDENT)
    return not one.tried and same and other.layout.style == OFFLOADED


def newest(steps: Sequence[StepTime], fewest: int) -> list[StepTime]:
    """The newest steps, at least `fewest` and SUSTAINED_S seconds together; empty while there are too few."""
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
