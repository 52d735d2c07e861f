"""The simulated cluster: agrees with the planner where lengths are constant, conserves items and devices, repeats."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from headrace_planner import (
    Cycle,
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Memory,
    PlanError,
    Profile,
    Share,
    Split,
    Sync,
    Workflow,
    Workload,
    embodied,
    lower_bound,
    plan,
    reasoning,
)
from headrace_planner.cluster import Label, by_label, simulate
from headrace_planner.trees.costs import Evaluation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONSTANT = Lengths((1.0,))
LONG_TAIL = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}, group_correlation=0.5)
ITEMS, GROUP, DEVICES = 64, 4, 8
WORKING = {Label.DECODE, Label.TRAIN, Label.WORK}


def few(examples):
    """Settings of a property: the same examples every time, however slow the machine."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


def leaf(stage, count=DEVICES):
    return Leaf(stage, "gpu", count)


def split_of(chunks, inner=1):
    return Split(Split(leaf("generate", 4), leaf("score", 2), inner), leaf("learn", 2), chunks)


TREES = {
    "resident": Share((leaf("generate"), leaf("score"), leaf("learn")), resident=True),
    "offloaded": Share((leaf("generate"), leaf("score"), leaf("learn"))),
    "sequential": split_of(1),
    "pipelined": split_of(8),
    "two pipelines": split_of(1, inner=4),
    "learners share": Split(leaf("generate", 4), Share((leaf("score", 4), leaf("learn", 4))), 4),
    "generators share": Share((Split(leaf("generate", 4), leaf("score", 4), 2), leaf("learn"))),
}
PIPELINES = ("two pipelines", "learners share", "generators share")


@st.composite
def workloads(draw, lengths):
    """Costs of generate → score → learn in which every division of 64 items comes out even."""
    seconds = st.floats(0, 20)
    barrier = draw(st.sampled_from([Granularity.TRAJECTORY, Granularity.GROUP]))
    profiles = {
        stage: Profile(
            stage,
            fixed_s=draw(seconds),
            item_s=draw(st.floats(0.1, 5)),
            host_item_s=draw(st.sampled_from([0.0, 0.05])),
            scaling_loss=draw(st.sampled_from([0.0, 0.14])),
            max_concurrency=draw(st.sampled_from([math.inf, 2, 4])),
            lengths=lengths if stage == "generate" else None,
            memory=Memory(draw(st.floats(0, 20)), draw(st.floats(0, 4))),
            load_s=draw(seconds),
            offload_s=draw(seconds),
        )
        for stage in ("generate", "score", "learn")
    }
    sync = Sync(draw(seconds), draw(seconds), draw(st.sampled_from([math.inf, 4.0])))
    workflow = reasoning(barrier, GROUP, infer=False)
    return Workload(workflow, profiles, {"gpu": DeviceKind(DEVICES, 80)}, ITEMS, sync)


@pytest.mark.parametrize("shape", TREES)
@few(25)
@given(work=workloads(CONSTANT))
def test_constant_lengths_take_the_predicted_seconds(shape, work):
    """The tolerance is float rounding: the simulator walks the tree by other means than the cost functions.

    A pipeline behind a generator whose memory holds not all sequences at once is simulated faster: its waves hand over
    before the end, the prediction has all equal sequences end together.
    """
    found, predicted = simulate(work, TREES[shape]).step_s, Evaluation(work).seconds(TREES[shape])
    waves = work.profiles["generate"].max_concurrency < math.inf
    if waves and shape in PIPELINES:
        assert found <= predicted * (1 + 1e-9)
    else:
        assert found == pytest.approx(predicted, rel=1e-9)


@few(40)
@given(work=workloads(LONG_TAIL), shape=st.sampled_from(sorted(TREES)), seed=st.integers(0, 9))
def test_items_and_devices_are_conserved_and_no_bound_is_beaten(work, shape, seed):
    found = simulate(work, TREES[shape], iterations=2, seed=seed)
    for learned in found.learned:
        assert sorted(learned) == list(range(ITEMS))
    did = Counter()
    for span in found.timeline.spans:
        did[span.stage] += span.items
    assert all(did[stage] == 2 * ITEMS for stage in work.workflow.stages)
    tiled(found, work)
    assert sum(by_label(found.timeline.device_seconds()).values()) == pytest.approx(
        DEVICES * sum(found.seconds)
    )
    busy = sum(span.device_seconds for span in found.timeline.spans if span.label in WORKING)
    assert busy <= DEVICES * sum(found.seconds) * (1 + 1e-9)
    for stage in ("score", "learn"):  # a stage alone on all devices, of which chunks only have fewer
        assert found.step_s >= work.profiles[stage].item_s * ITEMS / DEVICES * 0.5


def tiled(found, work):
    """Each device has exactly one label at any time."""
    for device in range(work.devices["gpu"].count):
        own = sorted(
            (span.begin, span.end)
            for span in found.timeline.spans
            if span.place.first <= device < span.place.first + span.place.count
        )
        assert own[0][0] == 0 and own[-1][1] == pytest.approx(sum(found.seconds))
        assert [begin for begin, _ in own[1:]] == pytest.approx([end for _, end in own[:-1]])


@few(40)
@given(work=workloads(CONSTANT), items=st.integers(8, 70), count=st.integers(3, 16))
def test_a_found_plan_with_uneven_numbers_is_never_under_the_bound(work, items, count):
    work = Workload(work.workflow, work.profiles, {"gpu": DeviceKind(count, 80)}, items, work.sync)
    try:
        made = plan(work.workflow, list(work.profiles.values()), work.devices, items, work.sync)
    except PlanError:
        return
    found = simulate(made.workload, made.tree)
    assert found.step_s >= lower_bound(made.workload) * (1 - 1e-9)
    assert sorted(found.learned[0]) == list(range(items))


def test_a_seed_repeats_and_another_one_does_not():
    profiles = {
        "generate": Profile("generate", fixed_s=10, item_s=0.5, lengths=LONG_TAIL),
        "score": Profile("score", item_s=0.01),
        "learn": Profile("learn", item_s=1.0),
    }
    work = Workload(reasoning(group_size=GROUP, infer=False), profiles, {"gpu": DeviceKind(DEVICES)}, ITEMS)
    once, again, other = (simulate(work, split_of(4), 3, seed) for seed in (1, 1, 2))
    assert once == again
    assert once.seconds != other.seconds and len(set(once.seconds)) == 3


def test_a_cycle_takes_the_predicted_seconds():
    profiles = {
        "generate": Profile("generate", fixed_s=5, item_s=0.5),
        "simulate": Profile("simulate", fixed_s=20, item_s=0.1, load_s=1, offload_s=2),
        "learn": Profile("learn", item_s=1.0),
    }
    work = Workload(embodied(), profiles, {"gpu": DeviceKind(8, 80)}, 32, Sync(3, 2))
    beside = Cycle(leaf("generate", 4), leaf("simulate", 4), batches=2)
    shared = Cycle(leaf("generate"), leaf("simulate"), shared=True)
    for tree in (Share((beside, leaf("learn"))), Share((shared, leaf("learn")), resident=True)):
        found = simulate(work, tree)
        assert found.step_s == pytest.approx(Evaluation(work).seconds(tree), rel=1e-9)
        tiled(found, work)


def test_waits_are_told_apart():
    """Generation ends early on most devices; scoring is slow; devices beyond the tree have no lease."""
    profiles = {
        "generate": Profile("generate", fixed_s=10, item_s=0.01, lengths=LONG_TAIL),
        "score": Profile("score", item_s=2.0),
        "learn": Profile("learn", item_s=0.1),
    }
    work = Workload(reasoning(group_size=GROUP, infer=False), profiles, {"gpu": DeviceKind(10)}, ITEMS)
    found = simulate(work, split_of(1), seed=3).timeline.device_seconds()
    assert found["learn", Label.WAIT_REWARD] > found["learn", Label.WAIT_TAIL] > 0
    assert found["generate", Label.WAIT_TAIL] > 0
    assert found["-", Label.WAIT_LEASE] > 0
    assert found["learn", Label.TRAIN] > 0 and found["score", Label.WORK] > 0


def test_two_generators_that_answer_each_other_are_simulated():
    edges = (Edge("ask", "answer"), Edge("answer", "learn", Granularity.GROUP))
    workflow = Workflow("dialogue", ("ask", "answer", "learn"), edges, (("learn", "answer"),), GROUP)
    profiles = {
        "ask": Profile("ask", fixed_s=4, item_s=0.1, lengths=LONG_TAIL),
        "answer": Profile("answer", fixed_s=8, item_s=0.1, lengths=LONG_TAIL),
        "learn": Profile("learn", item_s=0.5),
    }
    work = Workload(workflow, profiles, {"gpu": DeviceKind(8)}, ITEMS)
    tree = Split(Split(leaf("ask", 3), leaf("answer", 3), 4), leaf("learn", 2), 4)
    found = simulate(work, tree, seed=1)
    tiled(found, work)
    assert sorted(found.learned[0]) == list(range(ITEMS))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (split_of(8), "the cluster has 4"),
        (Share((leaf("generate", 4), leaf("learn", 4))), "place each stage once"),
        (
            Share((leaf("generate", 4), leaf("score", 4), leaf("learn", 4)), resident=True),
            "does not fit the memory",
        ),
    ],
)
def test_trees_that_cannot_run_are_refused(tree, words):
    profiles = {
        stage: Profile(stage, item_s=1, memory=Memory(120)) for stage in ("generate", "score", "learn")
    }
    work = Workload(reasoning(infer=False), profiles, {"gpu": DeviceKind(4, 80)}, ITEMS)
    with pytest.raises(PlanError, match=words):
        simulate(work, tree)


@pytest.mark.parametrize(
    ("items", "iterations", "words"), [(2.5, 1, "items"), (0, 1, "items"), (64, 0, "iterations")]
)
def test_parts_of_items_and_no_steps_are_refused(items, iterations, words):
    profiles = {stage: Profile(stage, item_s=1) for stage in ("generate", "score", "learn")}
    work = Workload(reasoning(infer=False), profiles, {"gpu": DeviceKind(8)}, items)
    with pytest.raises(PlanError, match=words):
        simulate(work, TREES["resident"], iterations)


def test_a_thousand_devices_are_simulated():
    profiles = {
        "generate": Profile("generate", fixed_s=50, item_s=3.0, lengths=LONG_TAIL, replica_devices=2),
        "score": Profile("score", item_s=0.02),
        "learn": Profile("learn", item_s=1.0, scaling_loss=0.14),
    }
    work = Workload(reasoning(infer=False), profiles, {"gpu": DeviceKind(1024)}, 8192)
    tree = Share((leaf("generate", 1024), leaf("score", 1024), leaf("learn", 1024)))
    assert len(simulate(work, tree).learned[0]) == 8192
