"""Layouts measured by turns, on clocks that run steadily and on such that do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from headrace_planner.placements.layouts import Layout, StepTime
from headrace_planner.placements.trials import Trial, merged

TURNS = Layout(2, 2, "collocated", "offloaded")
SIDES = Layout(1, 1, "disaggregated", "pipelined")
HYBRID = Layout(1, 1, "hybrid", "pipelined")
Speed = Callable[[float], float]
"""How many times as long as on an idle machine a step takes that begins after so many steps."""


class Machine:
    """Steps that take what their layout says, times what the machine does to them then."""

    def __init__(self, seconds: dict[Layout, float], speed: Speed) -> None:
        self.seconds, self.speed, self.steps = seconds, speed, 0

    def step(self, layout: Layout) -> StepTime:
        taken = self.seconds[layout] * self.speed(self.steps)
        self.steps += 1
        return StepTime(taken / 2, taken / 2, taken)

    def sequence(self, window: int) -> Layout:
        """Each layout once, after a step that settles: the one with the smaller median."""
        found = {}
        for layout in self.seconds:
            self.step(layout)
            found[layout] = median(self.step(layout).step for _ in range(window))
        return min(found, key=lambda layout: found[layout])

    def trial(self, window: int) -> tuple[Layout, Trial]:
        """The winner of measuring by turns."""
        trial, present, waiting = Trial(window), None, list(self.seconds)
        while (layout := waiting.pop(0) if waiting else trial.following()) is not None:
            if layout != present:
                self.step(layout)
                present = layout
            trial.add(layout, self.step(layout))
            while not trial.full(layout):
                trial.add(layout, self.step(layout))
        times = trial.times()
        return min(times, key=lambda layout: times[layout].step), trial


def steady(_: float) -> float:
    return 1.0


def recovering(step: float) -> float:
    """A neighbour leaves: steps that took half as long again take what they take on an idle machine in the end."""
    return 1.5 - min(0.5, step / 40)


def slowing(step: float) -> float:
    """A neighbour comes."""
    return 1.0 + min(0.5, step / 40)


@pytest.mark.parametrize("window", [3, 6])
@pytest.mark.parametrize(("speed", "better"), [(recovering, TURNS), (slowing, SIDES)])
def test_a_machine_that_drifts_favours_nobody(window: int, speed: Speed, better: Layout) -> None:
    """In sequence the later one profits from a machine that gets faster, the first one from one that slows."""
    seconds = {layout: 1.0 if layout == better else 1.06 for layout in (TURNS, SIDES)}
    assert Machine(seconds, speed).sequence(window) != better, "so the clock does mislead"
    machine = Machine(seconds, speed)
    winner, trial = machine.trial(window)
    assert winner == better
    times = trial.times()
    worse = SIDES if better == TURNS else TURNS
    assert times[worse].step / times[better].step == pytest.approx(1.06, rel=0.02)


def test_one_disturbed_block_does_not_decide() -> None:
    seconds = {TURNS: 1.1, SIDES: 1.0}
    winner, trial = Machine(seconds, lambda step: 1.6 if step in (2, 3) else 1.0).trial(3)
    assert winner == SIDES
    assert trial.times()[TURNS].step / trial.times()[SIDES].step == pytest.approx(1.1, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "speed", "steps"),
    [
        ({TURNS: 2.0, SIDES: 1.0}, steady, 4 + 4),
        ({TURNS: 1.01, SIDES: 1.0}, steady, 4 + 4),
        ({TURNS: 1.05, SIDES: 1.0}, lambda step: (1, 1.1, 1.2, 1, 1.3)[int(step) % 5], 8 + 8),
    ],
    ids=["clear", "nothing hangs on it", "noise"],
)
def test_it_ends_early_unless_noise_hides_the_difference(
    seconds: dict[Layout, float], speed: Speed, steps: int
) -> None:
    machine = Machine(seconds, speed)
    machine.trial(3)
    assert machine.steps == steps


@pytest.mark.parametrize("window", range(1, 13))
def test_its_cost_is_bounded(window: int) -> None:
    noise = random.Random(window)
    machine = Machine({TURNS: 1.0, SIDES: 1.0, HYBRID: 1.0}, lambda _: noise.uniform(1, 2))
    _, trial = machine.trial(window)
    assert machine.steps <= 3 * (window + window // 3) + 3 * 4, "and a step that settles before each block"
    assert set(trial.layouts) == {TURNS, SIDES, HYBRID}


def test_a_loser_is_not_measured_again_while_others_are() -> None:
    slow = {5: 1.4, 9: 1.3}
    machine = Machine({TURNS: 4.0, SIDES: 1.0, HYBRID: 1.05}, lambda step: slow.get(int(step), 1.0))
    _, trial = machine.trial(3)
    assert len(trial._blocks[TURNS]) == 2 < len(trial._blocks[SIDES])


def test_what_cannot_be_had_again_is_left_out() -> None:
    trial = Trial(3)
    trial.add(TURNS, StepTime(1, 1, 2))
    trial.add(SIDES, StepTime(1, 1, 1.9))
    assert trial.following() == TURNS
    trial.drop(TURNS)
    assert trial.following() is None and set(trial.times()) == {TURNS, SIDES}


def test_one_without_a_rival_is_measured_as_often_as_was_asked() -> None:
    trial = Trial(3)
    for _ in range(3):
        assert trial.following() in (TURNS, None)
        trial.add(TURNS, StepTime(1, 1, 2))
    assert trial.following() is None


def test_a_challenger_gets_a_second_block_where_the_first_is_faster() -> None:
    faster, slower = (StepTime(step / 2, step / 2, step) for step in (0.8, 1.1))
    champion = [StepTime(0.5, 0.5, 1.0)]
    trial = Trial(3, SIDES, champion)
    trial.add(HYBRID, faster)
    assert trial.following() == SIDES, "the machine may be faster now"
    trial.add(SIDES, faster)
    assert trial.following() == HYBRID
    trial.add(HYBRID, faster)
    assert trial.following() is None
    assert 0.9 < trial.times()[HYBRID].step / trial.times()[SIDES].step < 1
    trial = Trial(3, SIDES, champion)
    trial.add(HYBRID, slower)
    assert trial.following() is None, "it promised to be faster and is not"


def test_older_comparisons_are_taken_at_the_newer_ones_speed() -> None:
    known = {TURNS: StepTime(1, 1, 2), SIDES: StepTime(0.5, 0.5, 1)}
    newer = {SIDES: StepTime(0.75, 0.75, 1.5), HYBRID: StepTime(0.6, 0.6, 1.2)}
    assert merged(known, newer)[TURNS].step == pytest.approx(3.0)


def test_it_says_how_sure_it_is() -> None:
    best, trial = Machine({TURNS: 1.2, SIDES: 1.0}, recovering).trial(3)
    words = trial.words(best)
    assert "collocated offloaded on 2 took +" in words and "% longer (2 of 2 comparisons)" in words
    assert trial.words(HYBRID) == ""
