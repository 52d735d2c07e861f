"""A profile from measured steps: what a run says of its steps, as points that are fitted when the profile is read.

Plain data in, a profile's document out. Knows no run and no file; what no step says, such as memory, is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

HOST = "host"
"""Kind of the one device of stages that need no lease: rewards are computed beside the others' work."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
BESIDE = ("reward", "simulator")
"""Services that compute on the host, beside the devices, unless they were given some."""
HALVINGS = 40
SWITCHES = 4
"""Times that memory is released or taken in a step in turns: twice by each side."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step: trajectories, seconds by stage (and of `switch` and `sync`), devices by stage, and who took turns."""

    items: int
    seconds: Mapping[str, float]
    devices: Mapping[str, int]
    in_turns: bool


def profile_document(
    services: Mapping[str, str],
    kind: str,
    steps: Sequence[MeasuredStep],
    groups: Sequence[Sequence[int]],
    about: str,
) -> dict[str, Any]:
    """The document of a profile. `services`: stage → service; `kind`: of the devices; `groups`: tokens of each answer.

    Points are medians of the steps with as many items and devices. A profile may have too few of them to be fitted:
    its reader gets an error with the stage and the number.

    >>> step = MeasuredStep(8, {"generate": 2.0, "score": 0.1, "switch": 0.4}, {"generate": 2}, True)
    >>> made = profile_document({"generate": "rollout", "score": "reward"}, "gpu", [step], [[4, 4]], "an example")
    >>> made["stages"]["generate"]["points"], made["stages"]["generate"]["load_s"]
    ([{'items': 8, 'devices': 2, 'seconds': 2.0}], 0.1)
    >>> made["stages"]["score"]
    {'kind': 'host', 'host_item_s': 0.0125}
    """
    switch = [step.seconds.get("switch", 0.0) / SWITCHES for step in steps if step.in_turns]
    moved = {"load_s": _rounded(median(switch)), "offload_s": _rounded(median(switch))} if switch else {}
    stages: dict[str, dict[str, Any]] = {}
    for stage, service in services.items():
        if service in BESIDE and not any(step.devices.get(stage) for step in steps):
            each = [step.seconds[stage] / step.items for step in steps if stage in step.seconds]
            if each:
                stages[stage] = {"kind": HOST, "host_item_s": _rounded(median(each))}
            continue
        stages[stage] = {"kind": kind, "points": _points(stage, steps), **moved}
        if service == "rollout":
            stages[stage].update(_lengths(groups))
    return {"about": about, "stages": stages, "sync": _sync(steps)}


def _points(stage: str, steps: Sequence[MeasuredStep]) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        if stage in step.seconds and step.devices.get(stage):
            found[step.items, step.devices[stage]].append(step.seconds[stage])
    return [
        {"items": items, "devices": devices, "seconds": _rounded(median(seconds))}
        for (items, devices), seconds in sorted(found.items())
    ]


def _lengths(groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The distribution of output lengths, and how alike those of a group are; nothing where all are equal."""
    ordered = sorted(length for group in groups for length in group if length > 0)
    if not ordered or ordered[0] == ordered[-1]:
        return {}
    quantiles = {f"{share:g}": float(ordered[int(share * (len(ordered) - 1))]) for share in QUANTILES}
    found: dict[str, Any] = {"quantiles": {**quantiles, "1": float(ordered[-1])}}
    size = max(map(len, groups))
    whole = [group for group in groups if len(group) == size]
    if size > 1:
        found |= {"group_correlation": round(group_correlation(whole), 3), "group_size": size}
    return {"lengths": found}


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    """How alike lengths within groups of one size are, as `Lengths` takes it: 1 alike, 0 independent.

    The number of independent draws from all lengths whose longest is expected to be as long as a group's longest is on
    average, as a power of the size.

    >>> group_correlation([[3, 3], [9, 9], [5, 5]]), round(group_correlation([[1, 9], [9, 1], [1, 9]]), 6)
    (1.0, 0.0)
    """
    size = len(groups[0])
    ordered = sorted(length for group in groups for length in group)
    longest = sum(map(max, groups)) / len(groups)
    low, high = 1.0, float(size)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected_longest(ordered, middle) < longest else (low, middle)
    return min(1.0, max(0.0, 1 - math.log(low) / math.log(size))) if size > 1 else 1.0


def _expected_longest(ordered: Sequence[int], draws: float) -> float:
    """Expected longest of independent draws from equally likely lengths in rising order."""
    count = len(ordered)
    missing: float = sum(
        (b - a) * (place / count) ** draws for place, (a, b) in enumerate(pairwise(ordered), 1)
    )
    return ordered[-1] - missing


def _sync(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    sync: dict[str, float] = {}
    for key, in_turns in (("same_s", True), ("between_s", False)):
        seconds = [step.seconds.get("sync", 0.0) for step in steps if step.in_turns == in_turns]
        if seconds:
            sync[key] = _rounded(median(seconds))
    if "between_s" not in sync and sync:
        sync["between_s"] = sync["same_s"]  # Not measured apart: what publishing takes in turns.
    return sync


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
