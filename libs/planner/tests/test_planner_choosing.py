"""The choice of a placement from measured steps."""

from __future__ import annotations

import pytest
from headrace_planner.placements.choosing import candidates, choose, drifted, newest
from headrace_planner.placements.layouts import Layout, Shape, StepTime, typical

COLLOCATED = ("collocated", "offloaded")
RESIDENT = ("collocated", "resident")
APART = ("disaggregated", "pipelined")
SEQUENTIAL = ("disaggregated", "sequential")
HYBRID = ("hybrid", "pipelined")
BOTH, ALL = (COLLOCATED, APART), (COLLOCATED, RESIDENT, APART, SEQUENTIAL, HYBRID)
TURNS, SIDES = Layout(2, 2, *COLLOCATED), Layout(1, 1, *APART)
STREAMED, BATCHED = Shape(8, 4, streams=True), Shape(8, 4, streams=False)


def best(turns: StepTime, sides: StepTime, present: Layout | None = None) -> Layout:
    return choose(candidates(STREAMED, 2, (1, 1), BOTH, {TURNS: turns, SIDES: sides}), present).layout


def test_the_faster_of_what_was_measured_is_chosen():
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 1.8)) == SIDES
    assert best(StepTime(1, 1, 2.2), StepTime(2, 2, 2.6)) == TURNS


def test_a_gain_that_is_noise_does_not_move_devices():
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 2.15), present=TURNS) == TURNS
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 2.15), present=SIDES) == SIDES


def test_an_untried_division_that_promises_much_is_tried():
    # Generating is three times the work of learning and scales: three devices for it, one for the other.
    tried = {
        Layout(4, 4, *COLLOCATED): StepTime(6, 2, 8.2),
        Layout(2, 2, *APART): StepTime(12, 4, 12.8),
    }
    found = candidates(STREAMED, 4, (1, 1), BOTH, tried)
    chosen = choose(found)
    assert chosen.layout == Layout(3, 1, *APART) or chosen.layout.in_turns
    division = next(one for one in found if one.layout == Layout(3, 1, *APART))
    assert division.time.generate == pytest.approx(8), "12 s on two devices, 6 s on four: 8 s on three"
    assert division.time.learn == pytest.approx(8)
    assert not division.tried
    assert 8 <= division.time.step <= 10, (
        "a pipeline of two equal parts, and what the tried one took beyond that"
    )


def test_a_barrier_of_the_batch_streams_nothing():
    tried = {TURNS: StepTime(1, 1, 2.0), SIDES: StepTime(2, 2, 4.0)}
    streamed, batched = (candidates(shape, 2, (1, 1), BOTH, tried) for shape in (STREAMED, BATCHED))
    assert [one.time.step for one in streamed] == [one.time.step for one in batched], (
        "measured, not predicted"
    )


def test_a_slower_stage_changes_the_choice():
    tried = {TURNS: StepTime(1, 1, 2.2), SIDES: StepTime(1.2, 1.2, 1.6)}
    slow = StepTime(1.2, 4.8, 5.2)
    found = candidates(STREAMED, 2, (1, 1), BOTH, tried, (SIDES, slow))
    turns = next(one for one in found if one.layout == TURNS)
    assert turns.time.learn == pytest.approx(4), "it takes four times as long everywhere"
    assert turns.time.step == pytest.approx(5.2, abs=0.1)
    fast = candidates(STREAMED, 2, (1, 1), BOTH, tried, (SIDES, tried[SIDES]))
    assert {one.layout: round(one.time.step, 6) for one in fast} == {TURNS: 2.2, SIDES: 1.6}, (
        "no drift, no change"
    )


def test_only_a_lasting_deviation_is_drift():
    slow, usual = StepTime(1, 1, 2.9), StepTime(1, 1, 2.0)
    assert drifted(2.0, [slow] * 3)
    assert not drifted(2.0, [slow, usual, slow])
    assert drifted(2.0, [StepTime(1, 1, 1.2)] * 3), "faster steps call for a new look too"
    assert not drifted(2.0, [])
    assert typical([slow, usual, usual]) == usual


def test_short_steps_say_something_only_together():
    short, slow, long = (StepTime(step / 2, step / 2, step) for step in (0.125, 0.25, 2.5))
    assert newest([short] * 3, 3) == [] and newest([long] * 2, 3) == []
    assert newest([short, long, long, long], 3) == [long] * 3
    assert len(newest([short] * 60, 3)) == 40
    assert not drifted(0.125, newest([short, slow] * 20, 3)), "every second one is noise"
    assert drifted(0.125, newest([*[slow] * 7, short] * 4, 3)), "a single usual one does not hide it"


def test_stages_too_short_to_measure_are_no_error():
    tried = {TURNS: StepTime(0, 0, 0.1), SIDES: StepTime(0, 0, 0.2)}
    found = candidates(STREAMED, 2, (1, 1), BOTH, tried, (SIDES, StepTime(0.0, 1.0, 1.0)))
    assert choose(found).time.step >= 0


def seconds(layout: Layout, turns: StepTime, sides: StepTime) -> StepTime:
    found = candidates(STREAMED, 2, (1, 1), ALL, {TURNS: turns, SIDES: sides})
    return next(one for one in found if one.layout == layout).time


def test_staying_loaded_saves_what_moving_memory_took():
    turns = StepTime(1, 1, 2.5, after=1, switch=0.5, moved=0.3)
    found = seconds(Layout(2, 2, *RESIDENT), turns, StepTime(2, 2, 2.6))
    assert found.step == pytest.approx(2.2) and found.switch == pytest.approx(0.2)


def test_staying_loaded_is_tried_where_turns_lead_whatever_it_promises():
    tried = {TURNS: StepTime(1, 1, 2.2, after=1, switch=0.02, moved=0.01), SIDES: StepTime(2, 2, 2.6)}
    resident = Layout(2, 2, *RESIDENT)
    assert choose(candidates(STREAMED, 2, (1, 1), ALL, tried), TURNS).layout == resident
    slower = {**tried, resident: StepTime(1.1, 1.1, 2.4, after=1.1)}
    assert choose(candidates(STREAMED, 2, (1, 1), ALL, slower), resident).layout == TURNS, (
        "measured, it counts"
    )


def test_one_after_the_other_a_stage_is_freed_from_its_neighbour():
    # Side by side each takes 3 s; in turns on both devices 1 s: alone on one of them it takes 2 s at most.
    sides = StepTime(3, 3, 3.5, after=0.4, switch=0.1)
    found = seconds(Layout(1, 1, *SEQUENTIAL), StepTime(1, 1, 2.2), sides)
    assert found.step == pytest.approx(2 + 2 + 0.1)
    calm = seconds(Layout(1, 1, *SEQUENTIAL), StepTime(2, 2, 4.2), sides)
    assert calm.step == pytest.approx(3 + 3 + 0.1), "no more than it was measured to take"


def test_hybrid_learns_what_is_left_as_fast_as_in_turns():
    turns = StepTime(2, 1, 3.6, after=1, switch=0.6, moved=0.3)
    sides = StepTime(2, 2, 3.3, after=1.2, switch=0.1)
    found = seconds(Layout(1, 1, *HYBRID), turns, sides)
    assert found.after == pytest.approx(0.6), "half the time on twice the devices"
    assert found.step == pytest.approx(3.3 - 1.2 + 0.6 + (0.6 - 0.3 - 0.1))


def test_a_promising_layout_is_chosen_to_be_tried():
    turns = StepTime(2, 1, 3.6, after=1, switch=0.6, moved=0.3)
    sides = StepTime(2, 2, 3.3, after=1.2, switch=0.1)
    chosen = choose(candidates(STREAMED, 2, (1, 1), ALL, {TURNS: turns, SIDES: sides}))
    assert (chosen.layout, chosen.tried) == (Layout(1, 1, *HYBRID), False)


def test_what_rests_on_nothing_measured_is_no_candidate():
    found = candidates(STREAMED, 2, (1, 1), ALL, {TURNS: StepTime(1, 1, 2)})
    assert {one.layout for one in found} == {TURNS, Layout(2, 2, *RESIDENT)}


def test_a_step_whose_answers_are_made_ahead_takes_as_long_as_its_slower_side():
    """Three devices a side were measured: what learning has less, generating has more, and 0.3 s stay beyond it."""
    ahead = Shape(8, 4, streams=True, ahead=True)
    tried = {Layout(3, 3, *APART): StepTime(2.0, 6.0, 6.3)}
    best = choose(candidates(ahead, 6, (1, 1), (APART,), tried))
    assert best.layout == Layout(2, 4, *APART) and not best.tried
    assert (best.time.generate, best.time.learn) == pytest.approx((3.0, 4.5))
    assert best.time.step == pytest.approx(4.5 + 0.3)
