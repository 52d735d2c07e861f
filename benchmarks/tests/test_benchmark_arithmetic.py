"""The benchmarks' arithmetic on hand-made times; their measurements are no tests."""

import json

import pytest
import recovery
from _growth_runs import figures as growth_of_sizes
from _harness import emit
from _pipeline import Contention, StepTimes, ideal_end, ideal_wall, overlap_share, read_steps
from modes import Found, compare, scaled, seconds_of


@pytest.mark.parametrize(
    ("ready", "work", "end"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 1], 5),  # as fast as they come: fill 1, drain 1
        ([1, 2, 3, 4], [2, 2, 2, 2], 9),  # learning is the bottleneck: fill and all of it
        ([1, 2, 3, 10], [1, 1, 1, 1], 11),  # the long tail alone
        ([4, 1], [1, 5], 7),  # the order of arrival counts, not the order of the list
        ([3, 3, 3], [0, 0, 0], 3),
    ],
)
def test_the_bound_is_the_best_schedule(ready, work, end):
    assert ideal_end(ready, work) == end


def test_what_auto_chose_is_held_against_the_best_placement(capsys):
    turns, sides = "collocated resident", "disaggregated pipelined"

    def plan(style, **seconds):
        both = {turns: seconds["turns"], sides: seconds["sides"]}
        return {"style": style, "step_s": both, "tried": [turns]}

    plans = {"a": plan(turns, turns=1.0, sides=2.0), "b": plan(turns, turns=1.0, sides=2.2)}
    found = {
        "a": {turns: [1.0, 9.0, 1.0], sides: [2.0, 2.0, 2.0]},
        "b": {turns: [2.0, 2.0, 2.0], sides: [1.0, 1.0, 1.1]},
    }
    figures = compare(plans, found)
    assert (figures["auto_vs_best"], figures["winners_right"], figures["winners"]) == (2.0, 0.5, 2.0)
    assert figures["prediction_error"] == pytest.approx((0 + 0 + 0.5 + 1.2) / 4)
    assert figures["prediction_error_untried"] == pytest.approx((0 + 1.2) / 2)
    assert figures["b_collocated_resident_s"] == 2.0


def test_seconds_are_compared_at_one_speed_of_the_machine():
    runs = {"a": {"hybrid": [Found(2.0, 50.0), Found(1.0, 100.0)]}}
    assert seconds_of(runs) == {"a": {"hybrid": [2.0, 1.0]}}
    assert seconds_of(runs, 100.0) == {"a": {"hybrid": [1.0, 1.0]}}
    assert scaled({"speed": 50.0, "step_s": {"hybrid": 2.0}}, 100.0) == {"hybrid": 1.0}


def test_the_share_goes_from_waiting_to_the_bound():
    assert overlap_share(10, 10, 6) == 0
    assert overlap_share(10, 6, 6) == 1
    assert overlap_share(10, 7, 6) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="nothing can overlap"):
        overlap_share(5, 4, 5)


def _events():
    yield {"type": "RunStateChanged", "at": 90.0, "run": "r"}
    yield {"type": "StepOpened", "at": 100.0, "run": "r", "step": 3, "attempt": 1, "base": 4, "number": 5}
    yield {"type": "SlotsFinished", "at": 101.0, "run": "r", "slots": [[6, 0, 1, "a", 8], [6, 1, 1, "b", 12]]}
    yield {"type": "GroupsSettled", "at": 101.5, "run": "r", "groups": [[6, [0.0, 1.0]]]}
    yield {"type": "SlotsFinished", "at": 103.0, "run": "r", "slots": [[7, 0, 1, "c", 60], [8, 0, 1, "d", 9]]}
    yield {"type": "GroupsSettled", "at": 104.0, "run": "r", "groups": [[7, [0.5, 0.2]], [8, [1.0, 1.0]]]}
    yield {
        "type": "GroupsAccumulated",
        "at": 108.0,
        "run": "r",
        "step": 3,
        "attempt": 1,
        "prompts": [6, 7, 8],
    }
    yield {"type": "StepCommitted", "at": 108.5, "run": "r", "certificate": {}, "view": {}}
    yield {"type": "StepOpened", "at": 109.0, "run": "r", "step": 4, "attempt": 1, "base": 5, "number": 6}


def test_steps_are_read_from_the_event_log():
    (step,) = read_steps(_events())
    assert (step.step, step.wall, step.generate, step.drain, step.commit) == (3, 8.5, 4.0, 4.0, 0.5)
    assert step.work == {6: 20.0, 7: 60.0, 8: 0.0}  # equal rewards carry no gradient
    # Group 6 is ready at 1.5 and takes 4 s x 20/80; group 7 is ready at 4 and takes 3 s; then the commit.
    assert ideal_wall(step) == pytest.approx(4.0 + 3.0 + 0.5)


def test_a_step_that_waits_for_its_batch_learns_in_its_commit():
    step = StepTimes(1, 0.0, settled={0: 2.0, 1: 4.0}, work={0: 1.0, 1: 3.0}, accumulated=4.1, committed=8.5)
    waited = step.waited(0.5)
    assert (waited.wall, waited.generate, waited.drain, waited.commit) == (8.5, 4.0, 4.0, 0.5)
    assert ideal_wall(waited) == pytest.approx(4.0 + 3.0 + 0.5)


@pytest.mark.parametrize(
    ("contention", "ready", "work", "end"),
    [
        (Contention(2, 1), [1, 2], [1, 0], 2.5),  # half of the second group's decoding is beside learning
        (
            Contention(1, 2),
            [1, 4],
            [1, 1],
            5,
        ),  # learning is slower while the second group decodes, not after it
        (Contention(2, 2), [1, 2], [1, 1], 4),  # both are until the second group, which is learned alone
        (Contention(3, 3), [5], [1], 6),  # one group: nothing is beside anything
    ],
)
def test_stages_slow_each_other_down_where_both_are_at_work(contention, ready, work, end):
    assert ideal_end(ready, work, contention) == pytest.approx(end)


def test_contention_is_what_the_other_stages_work_costs_at_the_median():
    def step(generate, learn):
        return StepTimes(1, 0.0, settled={0: generate}, accumulated=generate + learn)

    alone, beside = (
        [step(1.0, 4.0), step(2.0, 4.0), step(3.0, 5.0)],
        [step(2.5, 3.0), step(9.0, 3.5), step(1.0, 9.0)],
    )
    assert Contention.of(alone, beside) == Contention(generate=1.25, learn=1.0)


def test_the_only_line_on_standard_output_is_json(capsys):
    emit("example", {"share": 0.8123456789, "missing": None})
    assert json.loads(capsys.readouterr().out) == {
        "benchmark": "example",
        "figures": {"share": 0.812346, "missing": None},
    }


def test_a_standstill_is_the_longest_time_without_a_commit_from_the_kill_on():
    commits = [(10.2, 7), (15.2, 6), (15.4, 7), (16.0, 8)]  # one in flight, then a rewind
    assert recovery.standstill(10.0, commits) == pytest.approx(5.0)
    assert recovery.caught_up(10.0, 7, commits) == pytest.approx(6.0)
    found = recovery.figures({"trainer": [5.0, 3.0, 9.0], "store": []}, [6.0], 10.0, 9.0)
    assert (found["trainer_p50_s"], found["trainer_max_s"], found["effective_share"]) == (5.0, 9.0, 0.9)
    assert "store_p50_s" not in found


def test_growth_is_after_the_last_runs_over_after_the_tenth():
    sizes = {"trainer": [9.0] * 7 + [2.0] * 3 + [8.0] * 5 + [3.0] * 3, "reward": [1.0] * 18}
    assert growth_of_sizes(sizes) == {"trainer_growth": 1.5, "reward_growth": 1.0, "worst_growth": 1.5}
