"""Chooses a run's placement from steps that it has made: what was measured decides, and costs predict the rest.

Knows no run, no fleet and no clock: numbers in, candidates out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_planner.placements.layouts import (
    COLLOCATED,
    OFFLOADED,
    RESIDENT,
    Layout,
    Shape,
    StepTime,
    Style,
)
from headrace_planner.placements.step_costs import StepCosts

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

    `fewest`: devices that generating and learning need. `tried`: typical steps. `now`: how a tried layout does today;
    the stages of all others are taken to have changed as its have. What says nothing of a layout leaves it out: of
    turns only turns do, and of two sides a pipelined step does.
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
    """The candidate to go on with, of some of which at least one was tried."""
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
    """Whether an untried candidate does the other's work and moves no memory: it is tried whatever it promises."""
    same = one.layout == replace(other.layout, style=RESIDENT)
    return not one.tried and same and other.layout.style == OFFLOADED


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
