"""What the planner decides in known situations, and what it refuses."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import replace

import pytest
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Memory,
    PlanError,
    Profile,
    Shapes,
    Share,
    Split,
    Sync,
    Workflow,
    embodied,
    plan,
    predict,
    reasoning,
)
from headrace_planner.trees.tree import devices


def test_two_kinds_of_devices_are_planned_together():
    profiles = [
        Profile("generate", fixed_s=5, item_s=1.0),
        Profile("simulate", "cpu", item_s=2.0),
        Profile("learn", item_s=1.0),
    ]
    made = plan(embodied(), profiles, {"gpu": DeviceKind(8), "cpu": DeviceKind(16)}, 64)
    assert devices(made.tree) == {"gpu": 8, "cpu": 16}
    without = [profile for profile in profiles if profile.kind == "gpu"]
    both = plan(embodied(), [*without, Profile("simulate", item_s=2.0)], {"gpu": DeviceKind(8)}, 64)
    choice = plan(
        embodied(),
        [*profiles, Profile("simulate", item_s=2.0)],
        {"gpu": DeviceKind(8), "cpu": DeviceKind(16)},
        64,
    )
    assert choice.seconds <= min(made.seconds, both.seconds)


def test_a_simulator_bound_by_the_host_gets_no_faster_with_devices():
    bound = Profile("simulate", fixed_s=1.0, item_s=0.001, host_item_s=1.0)
    profiles = [Profile("generate", item_s=0.5), bound, Profile("learn", item_s=0.1)]
    small, large = (plan(embodied(), profiles, {"gpu": DeviceKind(n)}, 64).seconds for n in (8, 800))
    assert large >= 64 and small < 1.5 * large


def test_a_neighbours_memory_slows_a_stage_and_decides_the_shape():
    generate = Profile("generate", fixed_s=10, item_s=1, memory=Memory(20, 0, 10), load_s=500)
    learn = Profile("learn", item_s=1, memory=Memory(40, 0, 1), load_s=500)
    workflow = reasoning(infer=False, group_size=1)
    workflow = replace(workflow, stages=("generate", "learn"), edges=(Edge("generate", "learn"),))
    roomy, tight = (
        plan(workflow, [generate, learn], {"gpu": DeviceKind(2, memory)}, 32).tree for memory in (800.0, 81.0)
    )
    assert isinstance(roomy, Share) and roomy.resident
    assert isinstance(tight, Split)


@pytest.mark.parametrize(
    ("barrier", "most"), [(Granularity.BATCH, 1), (Granularity.GROUP, 4), (Granularity.TRAJECTORY, 16)]
)
def test_the_barrier_bounds_the_chunks_into_learn(barrier, most):  # no replica idles at 16 chunks of 4 items
    workflow = Workflow("w", ("generate", "learn"), (Edge("generate", "learn", barrier),), group_size=16)
    profiles = [Profile("generate", item_s=1.0), Profile("learn", item_s=1.0)]
    tree = plan(workflow, profiles, {"gpu": DeviceKind(8)}, 64, shapes=Shapes(False, False)).tree
    assert isinstance(tree, Split) and tree.chunks == most


def test_a_tree_is_refused_that_misses_a_stage_breaks_the_order_or_does_not_fit():
    workflow = Workflow("w", ("a", "b"), (Edge("a", "b"),))
    profiles = [Profile(stage, item_s=1.0, memory=Memory(6.0)) for stage in "ab"]
    a, b = (Leaf(stage, "gpu", 4) for stage in "ab")
    for tree, words in (
        (a, "tree.b"),
        (Split(b, a), "tree.a: comes after b"),
        (Split(a, Leaf("b", "gpu", 9)), "devices.gpu: the tree needs 13"),
        (Share((a, b), resident=True), "fit alone, not in this tree"),
    ):
        with pytest.raises(PlanError) as refused:
            predict(tree, workflow, profiles, {"gpu": DeviceKind(8, 10.0)}, 64)
        assert words in str(refused.value)
    assert predict(Share((a, b)), workflow, profiles, {"gpu": DeviceKind(8, 10.0)}, 64) == 32


def test_weights_are_synchronised_between_devices_or_on_the_same():
    workflow = Workflow("w", ("generate", "learn"), (Edge("generate", "learn"),), (("learn", "generate"),))
    profiles = [Profile("generate", item_s=1.0), Profile("learn", item_s=1.0)]
    cluster = {"gpu": DeviceKind(8)}
    for sync, kind in ((Sync(between_s=100.0), Share), (Sync(same_s=100.0), Split)):
        assert isinstance(plan(workflow, profiles, cluster, 64, sync).tree, kind)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workflow("w", ("a",), (Edge("x", "a"),)), ["edges[0].source", "'x'", "name one of a"]),
        (lambda: Workflow("w", ("a", "a"), ()), ["stages.a", "declared 2 times"]),
        (
            lambda: Workflow(
                "w", ("a", "b", "c"), (Edge("a", "b"), Edge("b", "a"), Edge("b", "c"), Edge("c", "b"))
            ),
            ["stages.", "cycles that overlap", "a ⇄ b ⇄ c"],
        ),
        (
            lambda: plan(
                Workflow("w", ("a",), ()),
                [Profile("a", item_s=1, memory=Memory(2.0**40))],
                {"gpu": DeviceKind(4, 2.0**36)},
                4,
            ),
            ["stages.a", "1024.0 GiB", "64.0"],
        ),
        (
            lambda: plan(
                Workflow("w", ("a",), ()),
                [Profile("a", item_s=1, replica_devices=8)],
                {"gpu": DeviceKind(4)},
                4,
            ),
            ["stages.a", "needs 8 gpu", "there are 4"],
        ),
        (
            lambda: plan(Workflow("w", ("a", "b"), ()), [Profile("a", item_s=1)], {"gpu": DeviceKind(4)}, 4),
            ["stages.b", "covers no kind", "4 gpu"],
        ),
        (lambda: Profile("a", item_s=-1), ["stages.a.item_s", "-1"]),
        (lambda: Profile("a", item_s=1, replica_devices=4, sizes=(4, 6)), ["stages.a.sizes", "6 devices"]),
    ],
)
def test_refusals_name_the_stage_and_the_number(make, words):
    with pytest.raises(PlanError) as refused:
        make()
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_only_valid_sizes_are_used():
    profile = Profile("a", item_s=1.0, sizes=(1, 2, 4, 8))
    assert profile.seconds(64, 7) == profile.seconds(64, 4) == 16
    assert Profile("a", item_s=1.0, replica_devices=2).seconds(64, 5) == 64 / 2


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".cluster.simulating",
        ".trees.divisions",
        ".elastic.policy",
        ".profiling.fitting",
        ".profiling.lengths",
        ".planning",
        ".profiling.profiles",
        ".trees.tree",
    ],
)
def test_the_documented_examples_hold(module):
    found = doctest.testmod(importlib.import_module(f"headrace_planner{module}"))
    assert found.attempted and not found.failed
