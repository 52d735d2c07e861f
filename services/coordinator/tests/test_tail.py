"""What a run measures of its own steps for the elastic policy."""

from __future__ import annotations

import random

import pytest
from headrace_coordinator.run.step.tail import Tail
from headrace_planner.elastic.policy import ElasticState, Role, Rollout, plan_elastic

FIXED, EACH = 0.02, 0.001
"""Seconds of a token, and of a token of each answer that decodes beside it."""


def decoded(lengths):
    """When each of a replica's answers is finished, all begun at 0."""
    return [
        (FIXED * length + EACH * sum(min(length, other) for other in lengths), length) for length in lengths
    ]


def measured(steps=2, moved=False):
    tail, rng = Tail(), random.Random(1)
    for step in range(steps):
        tail.begin(100.0 * step)
        for replica in ("one", "two"):
            lengths = [1 + int(rng.expovariate(1 / 60)) for _ in range(32)]
            for seconds, tokens in sorted(decoded(lengths)):
                tail.finished(replica, tokens, 100.0 * step + seconds, prompt=30)
        tail.end(moved=moved)
        tail.learned(6.0, 4000, 2)
        tail.switched.add(0.2)
    return tail


def test_the_pace_of_the_replicas_is_found_from_when_their_answers_were_finished():
    tail = measured()
    terms = tail.terms(owners=2, group_size=4, shared=True)
    assert terms.generate.fixed_s / tail.mean == pytest.approx(FIXED, rel=1e-6)
    assert terms.generate.item_s / tail.mean == pytest.approx(EACH, rel=1e-6)
    assert terms.learn.seconds(4000 / tail.mean, 2) == pytest.approx(6.0)
    assert terms.shared and terms.learn.load_s == pytest.approx(0.2)


def test_a_helper_is_taken_to_be_as_slow_as_devices_scale_until_one_was_measured():
    tail = measured()
    assert tail.helper_s(4000) == pytest.approx(12.0)
    tail.helped(1e-9, 400)
    assert tail.helper_s(4000) == pytest.approx(12.0 * 0.9), "a piece with nothing to learn is one of many"
    tail.helped(4.0, 1600)
    assert tail.helper_s(4000) == pytest.approx(12.0 / 2 + 4.0)
    tail.helped(4.0, 2000), tail.helped(0.0, 10)
    assert tail.helper_s(4000) == pytest.approx(8.0), (
        "a step's tokens: devices that learn together are slower"
    )
    terms = tail.terms(owners=2, group_size=4, shared=True)
    assert terms.learn.seconds(4000 / tail.mean, 1) == pytest.approx(8.0)
    assert terms.learn.seconds(4000 / tail.mean, 2) == pytest.approx(6.0)
    assert terms.costs.resume_item_s == pytest.approx(tail.helper_s(4000) / 3 * tail.mean / 4000), (
        "its forward pass, once more"
    )
    assert terms.costs.prompt == pytest.approx(30 / tail.mean), "that of the prompt too"


def test_a_step_that_helpers_learned_almost_alone_leaves_the_owners_pace_its_weight():
    tail = measured()
    tail.helped(1e-9, 900)
    before = tail.helper_s(4000)
    tail.learned(6.0 * 20 / 4000, 20, 2)
    assert tail.helper_s(4000) == pytest.approx(before)


def test_a_few_tokens_that_helpers_left_say_nothing_of_the_owners_pace():
    """They are learned with what is done once a step."""
    tail = measured()
    for _ in range(8):
        tail.learned(0.3, 20, 2)
    terms = tail.terms(owners=2, group_size=4, shared=True)
    assert terms.learn.seconds(4000 / tail.mean, 2) == pytest.approx(6.0)


def test_answers_that_move_with_their_caches_are_not_computed_again():
    tail = measured()
    whole = tail.terms(owners=2, group_size=4, shared=True).costs.resume_item_s
    for cached in (True, True, True, False):
        tail.moved(cached=cached)
    assert tail.terms(owners=2, group_size=4, shared=True).costs.resume_item_s == pytest.approx(whole / 4)


def test_a_change_costs_nothing_until_it_was_made_twice():
    """Else what was never tried would look too dear to try, and its first time has what is done once."""
    tail = measured()
    for seconds, expected in ((5.0, 0.0), (0.1, 0.1), (0.3, 0.2)):
        tail.borrowed.add(seconds), tail.joined.add(seconds), tail.contributed.add(seconds)
        terms = tail.terms(owners=1, group_size=4, shared=False)
        costs = (terms.generate.load_s, terms.costs.notice_s, terms.costs.gradient_bytes)
        assert costs == pytest.approx((expected,) * 3)


def test_decoding_beside_helpers_takes_as_long_as_it_took_the_last_times():
    tail = measured()

    def beside():
        return tail.terms(owners=2, group_size=4, shared=True).beside

    found = [beside()]
    for seconds in (9.0, 1.3, 1.5, 1.4, 90.0, 90.0, 90.0, 90.0):
        tail.tailed(seconds, 1.0)
        found.append(beside())
    assert found[:5] == pytest.approx([1.0, 1.0, 1.3, 1.4, 1.4]), "the first has what is done once"
    assert found[-1] == 2.0, "and what is far off is not believed"
    tail.tailed(1.0, 0.0)
    assert beside() == 2.0


def test_nothing_is_said_before_two_steps_and_steps_that_moved_give_lengths_alone():
    assert Tail().terms(2, 4, shared=True) is None and measured(1).terms(2, 4, shared=True) is None
    assert measured(2, moved=True).terms(2, 4, shared=True) is None
    quiet = Tail()
    quiet.finished("one", 5, 1.0)  # a run without helpers keeps nothing
    assert quiet.longest == 0


def test_the_policy_moves_a_device_in_a_long_tail_and_not_where_learning_is_nothing():
    tail = measured()
    tail.joined.add(0.1), tail.contributed.add(0.05)
    rollouts = (Rollout("one", 1, 6), Rollout("two", 1, 5))
    state = ElasticState(tail.terms(2, 4, shared=True), rollouts, decoded=0.5, finished=50.0)
    assert [move.role for move in plan_elastic(state, 100.0)] == [Role.HELP]
    for _ in range(8):
        tail.learned(0.01, 4000, 2)
    state = ElasticState(tail.terms(2, 4, shared=True), rollouts, decoded=0.5, finished=50.0)
    assert plan_elastic(state, 100.0) == ()


def grouped(groups):
    tail = measured()
    for lengths in groups:
        tail.grouped(lengths)
    tail.begin(300.0), tail.end(moved=True)
    return tail.terms(2, 4, shared=True).lengths


def test_groups_say_how_alike_their_answers_are():
    rng = random.Random(3)
    drawn = [[1 + int(rng.expovariate(1 / 60)) for _ in range(4)] for _ in range(64)]
    alike = [[lengths[0]] * 4 for lengths in drawn]
    assert grouped(drawn).group_correlation < 0.2 and grouped(alike).group_correlation > 0.9
    assert grouped(drawn[:7]).group_correlation == 1.0, "too few say nothing"
    one_of_each, all_of_one = grouped(drawn), grouped(alike)
    assert one_of_each.arrived(1.0, 4) < 0.7 * all_of_one.arrived(1.0, 4), "a group waits for its longest"
