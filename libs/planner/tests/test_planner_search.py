"""Properties of the planner's search over random small workloads; brute force is here, by plain enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from headrace_planner import (
    Cycle,
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Memory,
    Node,
    PlanError,
    Profile,
    Shapes,
    Share,
    Split,
    Sync,
    Workflow,
    Workload,
    lower_bound,
    plan,
)
from headrace_planner.trees.costs import Evaluation
from headrace_planner.trees.divisions import DENSE
from headrace_planner.trees.tree import devices, leaves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHUNKS = (1, 2, 4)


def few(examples):
    """Settings of a property: the same examples every time, however slow the machine."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


LENGTHS = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}, group_correlation=0.5)
seconds = st.floats(0.0, 20.0)


@st.composite
def profiles_of(draw, stages):
    found = []
    for stage in stages:
        found.append(
            Profile(
                stage,
                fixed_s=draw(seconds),
                item_s=draw(st.floats(0.1, 5.0)),
                scaling_loss=draw(st.sampled_from([0.0, 0.1, 0.4])),
                replica_devices=draw(st.sampled_from([1, 1, 2])),
                lengths=LENGTHS if stage == "generate" and draw(st.booleans()) else None,
                memory=Memory(
                    draw(st.floats(0, 60)),
                    draw(st.floats(0, 20)),
                    draw(st.floats(0.1, 8)),
                    draw(st.booleans()),
                ),
                load_s=draw(st.floats(0, 5)),
                offload_s=draw(st.floats(0, 5)),
            )
        )
    return found


@st.composite
def workloads(draw):
    """A random graph of up to three units in a random order of names, its profiles, items and sync costs."""
    names = draw(st.permutations(["generate", "b", "c"]))[: draw(st.integers(1, 3))]
    grains = st.sampled_from([Granularity.TRAJECTORY, Granularity.GROUP, Granularity.BATCH])
    pairs = [(a, b) for n, a in enumerate(names) for b in names[n + 1 :]]
    edges = [Edge(a, b, draw(grains), draw(st.floats(0, 2))) for a, b in pairs if draw(st.booleans())]
    if draw(st.booleans()) and "generate" in names:
        names = [*names, "simulate"]
        edges += [
            Edge("generate", "simulate", Granularity.TURN),
            Edge("simulate", "generate", Granularity.TURN),
        ]
    weights = (("c", "generate"),) if {"c", "generate"} <= set(names) else ()
    workflow = Workflow("random", tuple(names), tuple(edges), weights, draw(st.sampled_from([1, 4])))
    sync = Sync(draw(seconds), draw(seconds), draw(st.sampled_from([math.inf, 4.0])))
    return workflow, draw(profiles_of(names)), draw(st.sampled_from([3, 16])), sync


def seconds_of(workload, count, **how):
    """Predicted seconds, infinity where nothing fits."""
    workflow, profiles, items, sync = workload
    try:
        return plan(workflow, profiles, {"gpu": DeviceKind(count, 80)}, items, sync, **how).seconds
    except PlanError:
        return math.inf


@few(120)
@given(
    workloads(),
    st.integers(1, 3),
    st.sampled_from([(True, True), (False, False), (True, False), (False, True)]),
)
def test_the_search_equals_brute_force(workload, count, sharing):
    """With and without Shares, so that Splits are compared where sharing would win as well."""
    workflow, profiles, items, sync = workload
    shapes = Shapes(*sharing, chunks=CHUNKS)
    count *= 4 if len(workflow.units) < 3 else 1  # more divisions to choose from where there are few trees
    known = {profile.stage: profile for profile in profiles}
    evaluation = Evaluation(Workload(workflow, known, {"gpu": DeviceKind(count, 80)}, items, sync))
    trees = [tree for tree in every_tree(workflow, count, CHUNKS) if allowed(tree, shapes)]
    best = min((evaluation.seconds(tree) for tree in trees), default=math.inf)
    assert seconds_of(workload, count, shapes=shapes) == pytest.approx(best, rel=1e-9)


def allowed(tree, shapes):
    """Whether a search may build a tree."""
    match tree:
        case Share(children, resident):
            own = shapes.resident if resident else shapes.offloaded
            return own and (resident or all(allowed(child, shapes) for child in children))
        case Split(first, second):
            return allowed(first, shapes) and allowed(second, shapes)
        case Cycle(_, _, _, shared):
            return shapes.resident or not shared
        case _:
            return True


@few(30)
@given(workloads(), st.integers(1, DENSE))
def test_a_plan_is_its_tree_and_above_the_lower_bound(workload, count):
    workflow, profiles, items, sync = workload
    try:
        made = plan(workflow, profiles, {"gpu": DeviceKind(count, 80)}, items, sync)
    except PlanError:
        return
    Evaluation(made.workload).check(made.tree)
    assert stages_of(made.tree) == sorted(workflow.stages)
    assert devices(made.tree)["gpu"] <= count
    assert Evaluation(made.workload).seconds(made.tree) == pytest.approx(made.seconds, rel=1e-9)
    assert made.seconds >= lower_bound(made.workload) * (1 - 1e-9)


@few(25)
@given(workloads(), st.integers(1, 160), st.integers(1, 20))
def test_more_devices_are_never_predicted_slower(workload, count, more):
    fewer = seconds_of(workload, count)
    assert seconds_of(workload, count + more) <= fewer * (1 + 1e-9)


@few(12)
@given(workloads(), st.integers(65, 400))
def test_above_the_exact_range_the_tree_is_not_slower_than_predicted(workload, count):
    workflow, profiles, items, sync = workload
    try:
        made = plan(workflow, profiles, {"gpu": DeviceKind(count, 80)}, items, sync)
    except PlanError:
        return
    assert devices(made.tree)["gpu"] <= count
    assert Evaluation(made.workload).seconds(made.tree) <= made.seconds * (1 + 1e-9)


@few(20)
@given(workloads(), st.integers(1, 32), st.randoms(use_true_random=False))
def test_the_order_of_stages_edges_and_profiles_changes_nothing(workload, count, random):
    workflow, profiles, items, sync = workload
    stages, edges, mixed = list(workflow.stages), list(workflow.edges), list(profiles)
    for order in (stages, edges, mixed):
        random.shuffle(order)
    other = replace(workflow, stages=tuple(stages), edges=tuple(edges)), mixed, items, sync
    assert seconds_of(other, count) == seconds_of(workload, count)


def every_tree(
    workflow: Workflow, devices: int, chunks: Sequence[int], batches: Sequence[int] = (1, 2)
) -> Iterator[Node]:
    """Trees of all units on one kind of device, Shares of any order that the edges allow."""
    yield from _trees(workflow, (1 << len(workflow.units)) - 1, devices, chunks, batches)


def _trees(
    workflow: Workflow, units: int, devices: int, chunks: Sequence[int], batches: Sequence[int]
) -> Iterator[Node]:
    if units & (units - 1) == 0:
        yield from _alone(workflow.units[units.bit_length() - 1], devices, batches)
        return
    stages = [_loaded(workflow.units[n], devices) for n in _sorted(workflow, units)]
    yield Share(tuple(stages), resident=True)
    for first, second in workflow.cuts(units):
        for left in _trees(workflow, first, devices, chunks, batches):
            for right in _trees(workflow, second, devices, chunks, batches):
                yield Share((*_flat(left), *_flat(right)))
        for mine in range(1, devices):
            for left in _trees(workflow, first, mine, chunks, batches):
                for right in _trees(workflow, second, devices - mine, chunks, batches):
                    yield from (Split(left, right, count) for count in chunks)


def _alone(unit: tuple[str, ...], devices: int, batches: Sequence[int]) -> Iterator[Node]:
    yield _loaded(unit, devices)
    if len(unit) == 2:
        for mine in range(1, devices):
            sides = Leaf(unit[0], "gpu", mine), Leaf(unit[1], "gpu", devices - mine)
            yield from (Cycle(*sides, batches=count) for count in batches)


def _loaded(unit: tuple[str, ...], devices: int) -> Leaf | Cycle:
    made = [Leaf(stage, "gpu", devices) for stage in unit]
    return made[0] if len(made) == 1 else Cycle(made[0], made[1], shared=True)


def _flat(node: Node) -> tuple[Node, ...]:
    return node.children if isinstance(node, Share) and not node.resident else (node,)


def _sorted(workflow: Workflow, units: int) -> list[int]:
    members = [n for n in range(len(workflow.units)) if units >> n & 1]
    order: list[int] = []
    while members:
        free = next(
            n for n in members if not any(workflow.between(1 << m, 1 << n) for m in members if m != n)
        )
        order.append(free)
        members.remove(free)
    return order


def stages_of(tree: Node) -> list[str]:
    """Stages of a tree, sorted."""
    return sorted(leaf.stage for leaf in leaves(tree))
