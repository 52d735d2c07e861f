"""What no elastic policy can beat in the simulated cluster's cost model: two bounds on the seconds of one step.

Both know all lengths ahead, and in both a move, a switch and a weight sync cost nothing. Starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace_coordinator.planner import Workload
from headrace_coordinator.planner.cluster.sampling import Draws

SPREADS = tuple(0.5 * 1.1**step for step in range(40))


def ideal(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """The longer of: all work over all devices with none ever idle; generation alone on all devices.

    Generation's fixed cost counts in the second alone. No schedule reaches it where both are near each other: devices
    that learn are devices that do not decode.
    """
    items, devices = sum(draws.weights), devices_of(work)
    marginal = work.profiles["generate"].parts(items, devices)[2]
    whole, _ = course(work, draws, math.inf)
    return max(marginal + learning(work, draws, helper_item_s), whole)


def fluid(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """All unfinished outputs decode together, on as many devices as is best at any time; the others learn.

    A mean length takes `fixed + each * n / k` seconds with n outputs on k devices, and `fixed * k + each * n` seconds
    of devices. Whatever a device-second that learns is worth, k is best in proportion to the square root of n; the
    best of these courses is the bound. Learning waits for nobody's answer.
    """
    found, learn = math.inf, learning(work, draws, helper_item_s)
    for spread in (*SPREADS, math.inf):
        seconds, idle = course(work, draws, spread)
        found = min(found, seconds + max(0.0, learn - idle))
    return found


def learning(work: Workload, draws: Draws, helper_item_s: float) -> float:
    """Seconds to learn everything on all devices, as one trainer group or as helpers, which is faster."""
    items, devices = sum(draws.weights), devices_of(work)
    together = work.profiles["learn"].seconds(items, devices)
    return min(together, items * helper_item_s / devices) if helper_item_s else together


def course(work: Workload, draws: Draws, spread: float) -> tuple[float, float]:
    """Seconds that all decode, and those of all devices that did not, with `spread * sqrt(share)` of them decoding."""
    lengths: Sequence[float] = sorted(draws.lengths["generate"])
    devices, count = devices_of(work), len(lengths)
    pace = work.profiles["generate"].pace(devices)
    seconds = idle = before = 0.0
    for index, length in enumerate(lengths):
        alive = count - index
        share = min(1.0, max(1 / devices, spread * math.sqrt(alive / count)))
        spent = (pace.fixed + pace.each * alive / (devices * share)) * (length - before)
        seconds, idle, before = seconds + spent, idle + (1 - share) * spent, length
    return seconds, idle


def devices_of(work: Workload) -> int:
    """Of the workload's one kind."""
    [kind] = work.devices.values()
    return kind.count
