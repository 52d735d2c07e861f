"""Stages that have devices of their own, as a run's placement names them: the plan's sides are given, not searched for.

Each set of devices becomes a kind of its own, so that the search gives every stage its seat and no other. Knows no run
spec: devices are names that are equal or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from headrace_planner.errors import refuse
from headrace_planner.graph import Workflow
from headrace_planner.profiling.measured import HOST
from headrace_planner.profiling.profiles import Profile, by_stage
from headrace_planner.trees.costs import DeviceKind
from headrace_planner.trees.search import CHUNKS, Shapes

Seats = Mapping[str, Sequence[str]]
"""Names of devices by stage."""


@dataclass(frozen=True)
class Seated:
    """A workload whose kinds of devices are its seats. `turns`: stages of different sides share devices.

    `devices` counts each device once. `on_host`: stages whose seat a profile of the host cannot tell apart.
    """

    profiles: list[Profile]
    cluster: dict[str, DeviceKind]
    shapes: Shapes
    turns: bool
    devices: int
    on_host: tuple[str, ...]


def seated(
    workflow: Workflow,
    profiles: Sequence[Profile],
    cluster: Mapping[str, DeviceKind],
    seats: Seats,
    *,
    streamed: bool = True,
    resident: bool = False,
) -> Seated:
    """The workload with `seats`; PlanError names the stage whose devices cannot be.

    `streamed`: sides with devices of their own hand over in chunks. `resident`: stages that take turns stay loaded.
    """
    _check(workflow, seats)
    turns = _turns(workflow, seats)
    kinds = {stage: _kind(stage, by_stage(profiles), cluster) for stage in sorted(workflow.stages)}
    _all_seated(seats, kinds)
    _enough(seats, kinds, cluster)
    labels = {stage: _label(kinds[stage], names) for stage, names in seats.items() if kinds[stage] != HOST}
    made = []
    for profile in profiles:
        if profile.kind != kinds.get(profile.stage):
            continue
        if resident and turns and profile.stage in labels:
            profile = replace(profile, load_s=0.0, offload_s=0.0)
        made.append(replace(profile, kind=labels.get(profile.stage, profile.kind)))
    found = {labels[stage]: replace(cluster[kinds[stage]], count=len(seats[stage])) for stage in labels}
    found |= {kinds[stage]: cluster[kinds[stage]] for stage in workflow.stages if stage not in labels}
    shapes = Shapes(resident=False, split=False) if turns else Shapes(chunks=CHUNKS if streamed else (1,))
    union = {name for stage in labels for name in seats[stage]}
    return Seated(made, found, shapes, turns, len(union), tuple(sorted({*seats} - {*labels})))


def _check(workflow: Workflow, seats: Seats) -> None:
    known = ", ".join(sorted(workflow.stages))
    for stage, names in seats.items():
        key = f"seats.stages.{stage}"
        if stage not in workflow.stages:
            raise refuse(key, f"the workflow has no stage {stage!r}", f"name one of {known}")
        if not names or len({*names}) < len(names):
            problem = "a device is named twice" if names else "no device is named"
            raise refuse(key, problem, "name each device once")
    for unit in workflow.units:
        for first, second in combinations([stage for stage in unit if stage in seats], 2):
            if both := sorted({*seats[first]} & {*seats[second]}):
                problem = f"{', '.join(both)} is of {first} too, which is at work at the same time"
                raise refuse(f"seats.stages.{second}", problem, "name other devices")


def _turns(workflow: Workflow, seats: Seats) -> bool:
    """Whether devices of one side are of another one too; stages that learn in one place are one side."""
    cycles = {stage for unit in workflow.units if len(unit) > 1 for stage in unit}
    for unit, other in combinations(workflow.units, 2):
        for first in unit:
            for second in other:
                mine, theirs = {*seats.get(first, ())}, {*seats.get(second, ())}
                if mine & theirs and (mine != theirs or {first, second} & cycles):
                    return True
    return False


def _kind(stage: str, known: Mapping[str, Mapping[str, Profile]], cluster: Mapping[str, DeviceKind]) -> str:
    """The kind of device that a stage runs on; a seat names no kind."""
    kinds = [kind for kind in sorted(known.get(stage, {})) if kind in cluster]
    beside = [kind for kind in kinds if kind != HOST] or kinds
    if len(beside) != 1:
        has = ", ".join(sorted(known.get(stage, {}))) or "no kind"
        problem = f"its profile covers {has}, the cluster has {', '.join(sorted(cluster)) or 'no devices'}"
        raise refuse(f"stages.{stage}", problem, "give a profile on one kind of the cluster's devices")
    return beside[0]


def _all_seated(seats: Seats, kinds: Mapping[str, str]) -> None:
    taken = {kinds[stage] for stage in seats} - {HOST}
    for stage, kind in kinds.items():
        if kind in taken and stage not in seats:
            raise refuse(f"seats.stages.{stage}", f"no {kind} is named for it", "name its devices too")


def _enough(seats: Seats, kinds: Mapping[str, str], cluster: Mapping[str, DeviceKind]) -> None:
    for kind in sorted({kinds[stage] for stage in seats} - {HOST}):
        named = {name for stage, names in seats.items() if kinds[stage] == kind for name in names}
        if len(named) > cluster[kind].count:
            problem = f"{len(named)} {kind} are named and the cluster has {cluster[kind].count}"
            raise refuse(
                f"cluster.{kind}.count", problem, f"use at least {len(named)}, or name fewer devices"
            )


def _label(kind: str, names: Sequence[str]) -> str:
    """What a seat is called beside a number of devices.

    >>> _label("gpu", ["0", "1", "2", "5"]), _label("cpu", ["a/0"])
    ('gpu[0-2,5]', 'cpu[a/0]')
    """
    parts: list[list[str]] = []
    for name in names:
        if parts and name.isdigit() and parts[-1][-1].isdigit() and int(name) == int(parts[-1][-1]) + 1:
            parts[-1] = [parts[-1][0], name]
        else:
            parts.append([name])
    return f"{kind}[{','.join('-'.join(part) for part in parts)}]"
