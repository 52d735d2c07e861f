"""What no elastic policy can beat in the simulated cluster's cost model: two bounds on the seconds of one step.

Both know all lengths ahead, and in both a move, a switch and a weight sync cost nothing. Starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace_planner import Workload
from headrace_planner.cluster.sampling import Draws

WEIGHTS = tuple(step / 40 for step in range(41))


def ideal(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """The longer of: all work over all devices with none ever idle; generation alone on all devices.

    Generation's fixed cost counts in the second alone. No schedule reaches it where both are near each other: devices
    that learn are devices that do not decode.
    """
    items, devices = sum(draws.weights), devices_of(work)
    marginal = work.profiles["generate"].parts(items, devices)[2]
    return max(marginal + learning(work, draws, helper_item_s), generating(work, draws))


def least(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """All unfinished outputs decode together, on whole devices of any number at any time; the others learn.

    Learning waits for nobody's answer. A step takes the seconds that something decodes, and what is left to learn then:
    seconds + max(0, learn - idle), with the idle device-seconds over all devices. For any weight of 0 to 1 that is at
    least seconds + weight * (learn - idle), whose least value is a sum over lengths, each with a number of devices of
    its own. So every weight gives a bound (Lagrange's dual), and the greatest of them is this one.
    """
    learn = learning(work, draws, helper_item_s)
    return max(_least(work, draws, weight) + weight * learn for weight in WEIGHTS)


def generating(work: Workload, draws: Draws) -> float:
    """Seconds of generation alone on all devices."""
    return _least(work, draws, 0.0)


def learning(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """Seconds to learn everything on all devices, as one trainer group or as helpers, which is faster."""
    items, devices = sum(draws.weights), devices_of(work)
    together = work.profiles["learn"].seconds(items, devices)
    return min(together, items * helper_item_s / devices) if helper_item_s else together


def _least(work: Workload, draws: Draws, weight: float) -> float:
    """The least of decoding's seconds less `weight` times those of all devices that idle meanwhile."""
    devices = devices_of(work)
    pace = work.profiles["generate"].pace(devices)
    seconds = 0.0
    for length, alive in _rounds(draws):
        # With k devices: (fixed + each * alive / k) * (1 - weight + weight * k / devices), which is convex in k.
        best = math.sqrt(_ratio(pace.each * alive * (1 - weight) * devices, pace.fixed * weight))
        near = {
            min(max(1, whole), devices)
            for whole in (math.floor(min(best, devices)), math.ceil(min(best, devices)))
        }
        seconds += length * min(
            (pace.fixed + pace.each * alive / k) * (1 - weight + weight * k / devices) for k in near
        )
    return seconds


def _rounds(draws: Draws) -> Iterator[tuple[float, int]]:
    """Each step from one length to the next, in mean lengths, and the outputs that take it."""
    lengths = sorted(draws.lengths["generate"])
    before = 0.0
    for index, length in enumerate(lengths):
        if length > before:
            yield length - before, len(lengths) - index
        before = length


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf


def devices_of(work: Workload) -> int:
    """Of the workload's one kind."""
    [kind] = work.devices.values()
    return kind.count
