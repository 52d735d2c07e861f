"""Intervals and pass@k of an evaluation."""

import random
from itertools import combinations
from math import nan

import pytest
from headrace_coordinator.api.reading.presenters import evaluation_view
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.estimates import interval, pass_at
from headrace_schema.resources.evaluations import EvaluationView
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World


def test_one_binary_answer_a_prompt_has_wilsons_interval():
    """The worked example of Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662, 0 of 20 up to 0.1611."""
    assert interval([[1.0]] * 81 + [[0.0]] * 182) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert interval([[0.0]] * 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_answers_of_one_prompt_are_one_draw():
    once = interval([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    assert once == interval([[0.0] * 9, [1.0] * 9, [0.5] * 9])
    assert once is not None and once[0] < 0.5 < once[1]


def test_an_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        low, high = interval([[rng.betavariate(2, 3), rng.betavariate(2, 3)] for _ in range(40)]) or (
            nan,
            nan,
        )
        covered += low <= 0.4 <= high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("scores", [[], [[1.0]], [[1.0, 0.0]], [[], [1.0]]])
def test_one_prompt_has_no_interval(scores):
    assert interval(scores) is None


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers():
    scores = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [1.0] * 5, [0.2, 0.9, 0.9, 1.0, 0.0]]
    found = pass_at(scores, 0.9)
    assert list(found) == [1, 2, 4, 5]
    for k, share in found.items():
        drawn = [
            [any(score >= 0.9 for score in chosen) for chosen in combinations(each, k)] for each in scores
        ]
        assert share == pytest.approx(sum(sum(each) / len(each) for each in drawn) / len(scores))


def test_pass_at_k_needs_as_many_answers_of_every_prompt():
    assert pass_at([[1.0], [1.0, 0.0]], 1.0) == pass_at([], 1.0) == pass_at([[]], 1.0) == {}


def test_a_run_reports_what_its_evaluations_are_worth():
    world = World(1, faults=False)
    section = world.spec.evaluation.model_copy(update={"samples": 2, "pass_reward": 0.0, "greedy": False})
    world.specs = [spec.model_copy(update={"evaluation": section}) for spec in world.specs]
    run_virtual(world.live())
    views = [event.view for event in world.store.log if isinstance(event, ev.Evaluated)]
    assert views
    for view in map(evaluation_view, views):
        assert view.score_low is not None and view.score_high is not None
        assert view.score_low <= view.score <= view.score_high
        assert view.pass_at == {"1": 1.0, "2": 1.0}, "every reward is at least 0"


def test_a_view_of_an_older_release_has_no_interval():
    old = {
        "kind": "heldout",
        "step": 1,
        "version": 2,
        "score": None,
        "parts": {},
        "answers": 1,
        "examples": [],
    }
    found = evaluation_view(old)
    assert found.score_low is None and found.score != found.score
    assert EvaluationView.model_validate(found.model_dump()).pass_at == {}
