"""The choice of a placement from measured steps."""

from __future__ import annotations

import pytest
from headrace_coordinator.planner.choosing import (
    Layout,
    Shape,
    StepTime,
    candidates,
    choose,
    drifted,
    newest,
    typical,
)

TURNS, SIDES = Layout(2, 2, in_turns=True), Layout(1, 1, in_turns=False)
STREAMED, BATCHED = Shape(8, 4, streams=True), Shape(8, 4, streams=False)


def best(turns: StepTime, sides: StepTime, present: Layout | None = None) -> Layout:
    return choose(candidates(STREAMED, 2, (1, 1), {TURNS: turns, SIDES: sides}), present).layout


def test_the_faster_of_what_was_measured_is_chosen():
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 1.8)) == SIDES
    assert best(StepTime(1, 1, 2.2), StepTime(2, 2, 2.6)) == TURNS


def test_a_gain_that_is_noise_does_not_move_devices():
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 2.15), present=TURNS) == TURNS
    assert best(StepTime(1, 1, 2.2), StepTime(1.5, 1.5, 2.15), present=SIDES) == SIDES


def test_an_untried_division_that_promises_much_is_tried():
    # Generating is three times the work of learning and scales: three devices for it, one for the other.
    tried = {
        Layout(4, 4, in_turns=True): StepTime(6, 2, 8.2),
        Layout(2, 2, in_turns=False): StepTime(12, 4, 12.8),
    }
    found = candidates(STREAMED, 4, (1, 1), tried)
    chosen = choose(found)
    assert chosen.layout == Layout(3, 1, in_turns=False) or chosen.layout.in_turns
    division = next(one for one in found if one.layout == Layout(3, 1, in_turns=False))
    assert division.time.generate == pytest.approx(8), "12 s on two devices, 6 s on four: 8 s on three"
    assert division.time.learn == pytest.approx(8)
    assert not division.tried
    assert 8 <= division.time.step <= 10, (
        "a pipeline of two equal parts, and what the tried one took beyond that"
    )


def test_a_barrier_of_the_batch_streams_nothing():
    tried = {TURNS: StepTime(1, 1, 2.0), SIDES: StepTime(2, 2, 4.0)}
    streamed, batched = (candidates(shape, 2, (1, 1), tried) for shape in (STREAMED, BATCHED))
    assert [one.time.step for one in streamed] == [one.time.step for one in batched], (
        "measured, not predicted"
    )


def test_a_slower_stage_changes_the_choice():
    tried = {TURNS: StepTime(1, 1, 2.2), SIDES: StepTime(1.2, 1.2, 1.6)}
    slow = StepTime(1.2, 4.8, 5.2)
    found = candidates(STREAMED, 2, (1, 1), tried, (SIDES, slow))
    turns = next(one for one in found if one.layout == TURNS)
    assert turns.time.learn == pytest.approx(4), "it takes four times as long everywhere"
    assert turns.time.step == pytest.approx(5.2, abs=0.1)
    fast = candidates(STREAMED, 2, (1, 1), tried, (SIDES, tried[SIDES]))
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
    found = candidates(STREAMED, 2, (1, 1), tried, (SIDES, StepTime(0.0, 1.0, 1.0)))
    assert choose(found).time.step >= 0
