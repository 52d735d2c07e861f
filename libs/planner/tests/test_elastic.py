"""The elastic policy, and steps of the simulated cluster that carry out its moves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    PlanError,
    Profile,
    Share,
    Split,
    Sync,
    Workflow,
    Workload,
    reasoning,
)
from headrace_planner.cluster import Label, elastic_step, simulate, simulate_elastic
from headrace_planner.cluster.sampling import Draws
from headrace_planner.elastic.outlook import MoveCosts, Terms
from headrace_planner.elastic.policy import (
    ElasticState,
    Move,
    Role,
    Rollout,
    helpers_until,
    plan_elastic,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG_TAIL = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260})
COSTS = MoveCosts(weight_bytes=14e9, gradient_bytes=28e9, link_bytes_per_s=50e9, resume_item_s=0.8)
WORKFLOW = Workflow(
    "grpo",
    ("generate", "learn"),
    (Edge("generate", "learn", Granularity.GROUP),),
    (("learn", "generate"),),
    group_size=16,
)
DEVICES = 16


def work_of(items=512, lengths=LONG_TAIL, learn_s=1.6, **generate):
    profiles = {
        "generate": Profile(
            "generate", fixed_s=51, item_s=3.0, lengths=lengths, load_s=3, offload_s=1, **generate
        ),
        "learn": Profile("learn", item_s=learn_s, scaling_loss=0.14, load_s=4, offload_s=3),
    }
    return Workload(WORKFLOW, profiles, {"gpu": DeviceKind(DEVICES + 1)}, items, Sync(3, 2))


def shared():
    return Share((Leaf("generate", "gpu", DEVICES), Leaf("learn", "gpu", DEVICES)))


def apart(owners=4, chunks=8):
    return Split(Leaf("generate", "gpu", DEVICES - owners), Leaf("learn", "gpu", owners), chunks)


def few(examples):
    """Settings of a property: the same examples every time, however slow the machine."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


@few(8)
@given(
    tree=st.sampled_from([shared(), apart(), apart(owners=6, chunks=1)]),
    items=st.sampled_from([136, 200, 384]),
    correlation=st.sampled_from([0.0, 1.0]),
    learn_s=st.floats(0.05, 8),
    seed=st.integers(0, 5),
    generate=st.sampled_from([{}, {"replica_devices": 2}, {"max_concurrency": 8}]),
    costs=st.sampled_from([COSTS, replace(COSTS, min_gain=0.0, min_hold_s=4.0), MoveCosts(min_hold_s=8.0)]),
    team=st.sampled_from([1, 3, 4]),
)
def test_items_and_devices_are_conserved_over_moves(
    tree, items, correlation, learn_s, seed, generate, costs, team
):
    lengths = replace(LONG_TAIL, group_correlation=correlation)
    work = work_of(items, lengths, learn_s, **generate)
    found = simulate_elastic(work, tree, costs, 2, seed, team)
    did = Counter()
    for span in found.timeline.spans:
        did[span.stage, span.label] += span.items
    assert did["generate", Label.DECODE] == did["learn", Label.TRAIN] == 2 * items
    assert all(sorted(learned) == list(range(items)) for learned in found.learned)
    for device in range(DEVICES + 1):
        own = sorted(
            (span.begin, span.end)
            for span in found.timeline.spans
            if span.place.first <= device < span.place.first + span.place.count
        )
        assert own[0][0] == 0 and own[-1][1] == pytest.approx(sum(found.seconds)), device
        assert [begin for begin, _ in own[1:]] == pytest.approx([end for _, end in own[:-1]]), device


@few(8)
@given(
    tree=st.sampled_from([shared(), apart(), apart(owners=8, chunks=8)]),
    items=st.sampled_from([512, 768]),
    learn_s=st.floats(0.2, 4),
    seed=st.integers(0, 5),
)
def test_moving_is_hardly_ever_slower_than_staying_and_beats_no_bound(tree, items, learn_s, seed):
    """The policy knows the distribution, not the lengths, so that it may lose; the tolerance bounds what, over 2 steps.

    With fewer groups (8 independent lengths) the distribution says little, and a step can lose more.
    """
    work = work_of(items, learn_s=learn_s)
    elastic, static = simulate_elastic(work, tree, COSTS, 2, seed), simulate(work, tree, 2, seed)
    assert elastic.step_s <= static.step_s * 1.1
    train = sum(span.device_seconds for span in elastic.timeline.spans if span.label is Label.TRAIN)
    assert sum(elastic.seconds) * DEVICES >= train
    longest = max(span.end - span.begin for span in elastic.timeline.spans if span.label is Label.DECODE)
    assert elastic.step_s >= longest / 2


def test_a_long_tail_is_shortened_and_helpers_pay_for_their_bytes():
    work = work_of()
    static = simulate(work, shared(), 2, 1).step_s
    paid = simulate_elastic(work, shared(), COSTS, 2, 1)
    free = simulate_elastic(work, shared(), replace(COSTS, weight_bytes=0, gradient_bytes=0), 2, 1)
    assert free.step_s < paid.step_s < 0.95 * static
    assert paid == simulate_elastic(work, shared(), COSTS, 2, 1)
    labels = {span.label for span in paid.timeline.spans}
    assert {Label.DECODE, Label.PREFILL, Label.TRAIN, Label.SWITCH, Label.SYNC} <= labels
    terms = Terms(work.profiles["generate"], work.profiles["learn"], 16, 4, shared=False, costs=COSTS)
    assert terms.join_s == pytest.approx(1 + 1 + 14 / 50)
    assert terms.contribution_s(9) == pytest.approx(3 * 28 / 50)


def test_a_helper_of_several_devices_learns_a_long_group_in_time_and_sends_one_gradient():
    work = work_of(items=1024)
    alone, team = (simulate_elastic(work, shared(), COSTS, 2, 1, devices) for devices in (1, 4))
    assert team.step_s < alone.step_s
    terms = Terms(work.profiles["generate"], work.profiles["learn"], 16, 4, True, COSTS, helper_devices=4)
    assert terms.contribution_s(16) == pytest.approx(28 / 50)
    assert terms.helper_s(8.0, 4) == pytest.approx(work.profiles["learn"].seconds(8.0, 4))
    measured = replace(terms, costs=replace(COSTS, helper_item_s=2.0))
    assert measured.helper_s(8.0, 4) == pytest.approx(8.0 * 2.0 / 4)


def test_devices_leave_one_after_the_other_as_outputs_end():
    found = simulate_elastic(work_of(items=1024), shared(), replace(COSTS, min_hold_s=4.0), 1, 1)
    joined = {span.begin for span in found.timeline.spans
              if span.label is Label.SWITCH and span.stage == "learn" and span.end < found.step_s - 20}  # fmt: skip
    assert len(joined) > 2


def test_a_moved_output_s_prompt_is_computed_again_too():
    work = work_of()
    long = replace(COSTS, prompt=20.0)
    times = [simulate_elastic(work, shared(), costs, 1, 1).step_s for costs in (COSTS, long)]
    assert times[1] > times[0] + 5
    moves = [
        plan_elastic(replace(state_of(), terms=replace(state_of().terms, costs=each)), now=100)
        for each in (COSTS, replace(COSTS, prompt=1e4))
    ]
    assert len(moves[0]) > len(moves[1])


def test_steps_of_given_lengths_take_what_these_take():
    work = work_of(items=32)
    short, long = (Draws({"generate": [length] * 32}, [length] * 32) for length in (0.5, 2.0))
    static = simulate(work, shared(), 2, given=(short, long))
    assert static.seconds[1] > static.seconds[0]
    again = simulate_elastic(work, shared(), COSTS, 2, given=(long, short))
    assert again.seconds[0] > again.seconds[1]


def state_of(decoded=2.5, unfinished=2, count=8, **changes):
    terms = Terms(work_of().profiles["generate"], work_of().profiles["learn"], 16, count, True, COSTS)
    rollouts = tuple(Rollout(f"r{n}", 1, unfinished + n % 2) for n in range(count))
    return ElasticState(terms, rollouts, decoded, finished=200.0, **changes)


def test_when_the_tail_decodes_the_emptiest_rollouts_become_helpers():
    moves = plan_elastic(state_of(), now=100)
    assert moves and all(move.role is Role.HELP for move in moves)
    assert {move.rollout for move in moves} >= {"r0", "r2", "r4"}
    assert len(moves) < 8


def test_devices_stay_longer_where_decoding_beside_helpers_is_slow():
    """And a helper has longer for a group that it takes."""
    state = state_of()
    slow = replace(state, terms=replace(state.terms, beside=3.0))
    assert len(plan_elastic(slow, now=100)) < len(plan_elastic(state, now=100))
    assert helpers_until(slow) > 2 * helpers_until(state)


def test_borrowed_owners_go_back_before_anybody_helps():
    state = state_of()
    terms = replace(state.terms, shared=False, owners=2)
    rollouts = tuple(replace(rollout, owner=n > 5) for n, rollout in enumerate(state.rollouts))
    moves = plan_elastic(replace(state, terms=terms, rollouts=rollouts), now=100)
    assert {move.rollout for move in moves if move.role is Role.OWN} == {"r6", "r7"}


def test_nothing_moves_within_the_hold_or_for_too_small_a_gain():
    assert plan_elastic(state_of(moved_at=95.0), now=100) == ()
    dear = replace(state_of().terms, costs=replace(COSTS, gradient_bytes=1e14))
    assert plan_elastic(replace(state_of(), terms=dear), now=100) == ()
    eager = replace(state_of().terms, costs=replace(COSTS, min_gain=0.9))
    assert plan_elastic(replace(state_of(), terms=eager), now=100) == ()


def test_nothing_moves_when_all_is_decoded_and_at_a_step_begin():
    done = tuple(Rollout(f"r{n}", 1, 0) for n in range(4))
    assert plan_elastic(replace(state_of(), rollouts=done), now=math.inf) == (), "the owners take the devices"
    begin = replace(state_of(decoded=0.0, unfinished=32), finished=0.0)
    assert plan_elastic(begin, now=0.0) == ()


def test_rollouts_that_decode_no_more_help_owners_that_still_learn():
    """At once: with nothing left to decode no device goes back and forth. Each needs a group of its own."""
    terms = replace(state_of().terms, shared=False, owners=2)
    done = tuple(Rollout(f"r{n}", 1, 0) for n in range(4))
    state = ElasticState(terms, done, 4.0, finished=200.0, owners_learn=True, moved_at=99.9)
    moves = plan_elastic(state, now=100)
    assert [(move.rollout, move.role) for move in moves] == [(f"r{n}", Role.HELP) for n in range(4)]
    assert len(plan_elastic(replace(state, finished=40.0), now=100)) == 2
    assert plan_elastic(replace(state, finished=16.0), now=100) == (), (
        "the owners have it before anybody joined"
    )
    assert plan_elastic(replace(state, owners_learn=False), now=100) == ()
    assert plan_elastic(replace(state, terms=replace(terms, helper_devices=8)), now=100) == ()


def test_devices_that_decoded_to_the_end_learn_what_the_owners_have_left():
    work, tree = work_of(items=1024), apart(owners=2, chunks=32)
    static, found = simulate(work, tree, 1, 1), simulate_elastic(work, tree, COSTS, 1, 1)
    decoded = max(span.end for span in found.timeline.spans if span.label is Label.DECODE)
    last = {s.place.first for s in found.timeline.spans if s.label is Label.DECODE and s.end > decoded - 1}
    learn = {
        span.place.first for span in found.timeline.spans if span.label is Label.TRAIN and span.end > decoded
    }
    assert last & learn
    assert found.step_s < 0.7 * static.step_s


def test_a_device_moves_when_it_would_by_somebody_who_knows_all_lengths(monkeypatch):
    """Answers of a group differ: those that wait for the rest of their group are no work for a helper yet."""
    lengths = replace(LONG_TAIL, group_correlation=0.0)
    profiles = {
        "generate": Profile("generate", "cpu", fixed_s=0.65, item_s=0.032, lengths=lengths),
        "learn": Profile("learn", "cpu", item_s=0.06, scaling_loss=0.2),
    }
    workflow = replace(WORKFLOW, group_size=4)
    work = Workload(workflow, profiles, {"cpu": DeviceKind(2)}, 96, Sync(0.02, 0.02))
    tree = Share((Leaf("generate", "cpu", 2), Leaf("learn", "cpu", 2)))
    costs = MoveCosts(notice_s=0.05, resume_item_s=0.02, helper_item_s=0.06, min_gain=0.05, min_hold_s=0.25)
    seeds = range(6)

    def mean(policy):
        monkeypatch.setattr(elastic_step, "plan_elastic", policy)
        return fmean(simulate_elastic(work, tree, costs, 1, seed).step_s for seed in seeds)

    def at(seconds):
        def policy(state, now):
            emptiest = min(state.rollouts, key=lambda rollout: rollout.unfinished)
            due = now >= seconds and len(state.rollouts) == 2
            return (Move(emptiest.name, Role.HELP),) if due else ()

        return policy

    best = min(mean(at(step / 4)) for step in range(2, 20))
    assert mean(plan_elastic) < 1.02 * best < mean(at(math.inf))


def test_a_helper_takes_a_group_only_where_the_owners_would_be_later_with_all_that_waits():
    terms = replace(state_of().terms, shared=False, owners=2)
    state = ElasticState(terms, (), 4.0, finished=40.0, begun=60.0, helpers=4, owners_learn=True)
    assert helpers_until(state) == pytest.approx(terms.learn.seconds(100, 2))
    assert helpers_until(replace(state, begun=0.0)) == pytest.approx(terms.learn.seconds(40, 2))


@pytest.mark.parametrize(
    "tree",
    [
        Share((Leaf("generate", "gpu", 4), Leaf("learn", "gpu", 4)), resident=True),
        Share((Leaf("generate", "gpu", 4), Leaf("learn", "gpu", 8))),
    ],
)
def test_trees_that_devices_cannot_move_in_are_refused(tree):
    with pytest.raises(PlanError, match="tree"):
        simulate_elastic(work_of(), tree, COSTS)


def test_a_batch_barrier_and_idle_rollouts_are_refused():
    edges = (Edge("generate", "learn", Granularity.BATCH),)
    work = work_of()
    with pytest.raises(PlanError, match="waits for the batch"):
        simulate_elastic(replace(work, workflow=replace(WORKFLOW, edges=edges)), shared(), COSTS)
    with pytest.raises(PlanError, match="8 items do not occupy 16"):
        simulate_elastic(work_of(items=8), shared(), COSTS)


def test_three_stages_are_refused():
    profiles = {**work_of().profiles, "score": Profile("score", item_s=1)}
    work = Workload(reasoning(infer=False), profiles, {"gpu": DeviceKind(4)}, 64)
    tree = Share(tuple(Leaf(stage, "gpu", 4) for stage in ("generate", "score", "learn")))
    with pytest.raises(PlanError, match="two stages"):
        simulate_elastic(work, tree, COSTS)


@pytest.mark.parametrize(
    ("costs", "key"),
    [
        (lambda: MoveCosts(link_bytes_per_s=0), "link_bytes_per_s"),
        (lambda: MoveCosts(notice_s=-1), "notice_s"),
        (lambda: MoveCosts(min_hold_s=0), "min_hold_s"),
        (lambda: MoveCosts(gradient_bytes=math.nan), "gradient_bytes"),
    ],
)
def test_costs_that_are_none_are_refused(costs, key):
    with pytest.raises(PlanError, match=key):
        costs()
