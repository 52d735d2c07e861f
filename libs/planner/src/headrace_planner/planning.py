"""The planner's entry points: the best plan, and the seconds of any given one. Pure; knows no file and no fleet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_planner.errors import PlanError, PlanProblem, refuse
from headrace_planner.graph import Workflow
from headrace_planner.profiling.profiles import Profile, by_stage
from headrace_planner.trees.costs import (
    NO_SYNC,
    DeviceKind,
    Evaluation,
    Sync,
    Workload,
    assignments,
)
from headrace_planner.trees.divisions import Counts
from headrace_planner.trees.search import ALL_SHAPES, Found, Search, Shapes
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split, devices, leaves

GIB = 2.0**30
FIXES = "share without resident, hand over fewer and larger chunks, or add devices"


@dataclass(frozen=True)
class Plan:
    """A plan tree, the predicted seconds of one step, and the workload that it was made for."""

    seconds: float
    tree: Node
    workload: Workload


def plan(
    workflow: Workflow,
    profiles: Sequence[Profile],
    cluster: Mapping[str, DeviceKind],
    items: float,
    sync: Sync = NO_SYNC,
    shapes: Shapes = ALL_SHAPES,
) -> Plan:
    """The fastest plan of a step of `items` items.

    Never slower with more devices: a plan may leave devices idle. PlanError names the stage and the number when a
    stage has no profile, or when it fits no device.

    >>> from headrace_planner import DeviceKind, Profile, reasoning
    >>> profiles = [Profile("generate", fixed_s=10, item_s=0.1), Profile("score", item_s=0.001),
    ...             Profile("learn", item_s=1.0)]
    >>> round(plan(reasoning(infer=False), profiles, {"gpu": DeviceKind(8)}, items=64).seconds, 1)
    18.8
    """
    if not (math.isfinite(items) and items >= 1):
        raise refuse("items", f"{items} items a step", "use 1 or more")
    kinds = {kind: device for kind, device in sorted(cluster.items()) if device.count > 0}
    best: Plan | None = None
    known = by_stage(profiles)
    for chosen in assignments(workflow, known, kinds):
        work = Workload(workflow, chosen, kinds, float(items), sync)
        search = Search(work, shapes)
        units, counts = (1 << len(workflow.units)) - 1, tuple(kind.count for kind in kinds.values())
        seconds = search.best(units, counts, work.items).seconds
        if math.isfinite(seconds) and (best is None or seconds < best.seconds):
            best = Plan(seconds, _build(search, units, counts, work.items), work)
    if best is None:
        raise PlanError(*_unfit(workflow, known, kinds, float(items)))
    return best


def _build(search: Search, units: int, counts: Counts, items: float, given: Counts | None = None) -> Node:
    """The tree that `search.best` has found. `given`: devices; they may exceed `counts` by what was rounded off."""
    return _node(search, search.best(units, counts, items), units, items, counts, given or counts)


def _node(search: Search, found: Found, units: int, items: float, counts: Counts, given: Counts) -> Node:
    match found.shape:
        case "leaf":
            return search.leaf(search.stages(units)[0], given)
        case "resident":
            return Share(
                tuple(_loaded(search, unit, given) for unit in _in_order(search, units)), resident=True
            )
        case "shared cycle":
            return _loaded(search, units, given)
        case "cycle":
            mine, theirs = _with_rest(found, given)
            left, right = search.stages(units)
            return Cycle(search.leaf(left, mine), search.leaf(right, theirs), found.chunks)
        case "offloaded":
            return Share(tuple(_turns(search, found, items, counts, given)))
    return _split(search, found, items, given)


def _split(search: Search, found: Found, items: float, given: Counts) -> Split:
    first, second = found.cut
    passes = 1 if search.work.source(first) else found.chunks
    mine, theirs = _with_rest(found, given)
    return Split(
        _build(search, first, found.counts[0], items / passes, mine),
        _build(search, second, found.counts[1], items / found.chunks, theirs),
        found.chunks,
    )


def _turns(search: Search, found: Found, items: float, counts: Counts, given: Counts) -> Iterator[Node]:
    first, second = found.cut
    yield _node(search, search.unshared(first, counts, items), first, items, counts, given)
    plain, rest = search.unshared(second, counts, items), search.offloaded(second, counts, items)
    if rest.seconds < plain.seconds + search.work.turn_seconds(search.stages(second)):
        yield from _turns(search, rest, items, counts, given)
    else:
        yield _node(search, plain, second, items, counts, given)


def _with_rest(found: Found, given: Counts) -> tuple[Counts, Counts]:
    """Each side's devices; what the ladder rounded off goes to the second side."""
    mine, theirs = found.counts
    return mine, tuple(total - a if b else 0 for a, b, total in zip(mine, theirs, given, strict=True))


def _loaded(search: Search, unit: int, counts: Counts) -> Leaf | Cycle:
    made = [search.leaf(stage, counts) for stage in search.stages(unit)]
    return made[0] if len(made) == 1 else Cycle(made[0], made[1], shared=True)


def _in_order(search: Search, units: int) -> list[int]:
    """Single units of a set, producers before consumers."""
    order: list[int] = []
    while units & (units - 1):
        first = next(first for first, _ in search.work.workflow.cuts(units) if first & (first - 1) == 0)
        order.append(first)
        units &= ~first
    return [*order, units]


def predict(
    tree: Node,
    workflow: Workflow,
    profiles: Sequence[Profile],
    cluster: Mapping[str, DeviceKind],
    items: float,
    sync: Sync = NO_SYNC,
) -> float:
    """Seconds of one step under a given tree.

    PlanError when the tree misses a stage, has more devices than the cluster, or does not fit the memory.
    """
    known, kinds = by_stage(profiles), {leaf.stage: leaf.kind for leaf in leaves(tree)}
    for kind, count in devices(tree).items():
        if kind not in cluster or cluster[kind].count < count:
            has = cluster[kind].count if kind in cluster else 0
            raise refuse(
                f"devices.{kind}", f"the tree needs {count}, the cluster has {has}", "use a smaller tree"
            )
    for stage, kind in kinds.items():
        if kind not in known.get(stage, {}):
            raise refuse(f"stages.{stage}", f"has no profile on {kind}", "add one")
    work = Workload(
        workflow, {stage: known[stage][kind] for stage, kind in kinds.items()}, cluster, items, sync
    )
    evaluation = Evaluation(work)
    evaluation.check(tree)
    seconds = evaluation.seconds(tree)
    if math.isinf(seconds):
        alone = {
            leaf.stage: {leaf.kind: replace(cluster[leaf.kind], count=leaf.devices)} for leaf in leaves(tree)
        }
        found = [item for stage, own in alone.items() for item in _unfit_stage(stage, known, own, items)]
        raise PlanError(*(found or [PlanProblem("tree", "the stages fit alone, not in this tree", FIXES)]))
    return seconds


def lower_bound(work: Workload) -> float:
    """Seconds that no plan of the workload can beat: one stage alone on all devices, and all work over all devices."""
    alone, area = 0.0, dict.fromkeys(work.devices, 0.0)
    for profile in work.profiles.values():
        device = work.devices[profile.kind]
        alone = max(alone, profile.seconds(work.items, device.count))
        area[profile.kind] += profile.item_s * work.items * profile.replica_devices
    return max(alone, *(area[kind] / device.count for kind, device in work.devices.items()))


def _unfit(
    workflow: Workflow,
    known: Mapping[str, Mapping[str, Profile]],
    cluster: Mapping[str, DeviceKind],
    items: float,
) -> list[PlanProblem]:
    found = [item for stage in sorted(workflow.stages) for item in _unfit_stage(stage, known, cluster, items)]
    return found or [
        PlanProblem("devices", "the stages fit one by one but in no tree together", "add devices")
    ]


def _unfit_stage(
    stage: str,
    known: Mapping[str, Mapping[str, Profile]],
    cluster: Mapping[str, DeviceKind],
    items: float,
) -> list[PlanProblem]:
    found = []
    for kind, profile in known[stage].items():
        device = cluster.get(kind, DeviceKind(0))
        used = profile.used(items, device.count)
        if not used:
            problem = f"needs {profile.smallest} {kind} at least, there are {device.count}"
            found.append(PlanProblem(f"stages.{stage}", problem, "add devices or profile smaller replicas"))
        elif profile.concurrency(used, device.memory_bytes) < 1:
            one = profile.memory.item_bytes / profile.replica_devices
            needs = (profile.reserved_bytes(used) + one) / GIB
            problem = (
                f"needs {needs:.1f} GiB on each of {used} {kind}, which have {device.memory_bytes / GIB:.1f}"
            )
            found.append(
                PlanProblem(
                    f"stages.{stage}", problem, "use more devices, larger replicas or a smaller model"
                )
            )
        else:
            return []
    return found
