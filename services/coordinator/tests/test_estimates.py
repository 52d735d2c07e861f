"""Intervals and pass@k of an evaluation."""

import random
from itertools import combinations
from math import nan

import pytest
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


def wilson(mean: float, count: float) -> tuple[float, float]:
    """Wilson 1927 by its definition: the shares p from which the mean is 1.96 standard errors of p away."""
    shares = [place / 200_000 for place in range(200_001)]
    near = [p for p in shares if (mean - p) ** 2 <= 1.959964**2 * p * (1 - p) / count]
    return near[0], near[-1]


@pytest.mark.parametrize("samples", [2, 4, 16])
@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_equal_items_leave_a_width_by_their_number(samples, score):
    """Twenty items that are all right in all their answers say no more than 20 draws, however many answers each has."""
    right = round(score * samples)
    found = interval([[1.0] * right + [0.0] * (samples - right)] * 20)
    assert found == pytest.approx(wilson(score, 20), abs=1e-4)
    assert interval([[score]] * 20) == pytest.approx(wilson(score, 20), abs=1e-4)


def test_scores_between_0_and_1_stay_there_and_others_need_a_spread():
    low, high = interval([[1.0, 1.0]] * 9 + [[1.0, 0.0]]) or (nan, nan)
    assert 0.7 < low < 0.95 < high < 1.0
    low, high = interval([[3.0, 1.0], [2.0, 4.0], [2.5, 3.5]]) or (nan, nan)
    assert (low + high) / 2 == pytest.approx(8 / 3) and low < 2.5 < 2.9 < high
    assert interval([[5.0, 5.0]] * 20) is None, (
        "returns that are all alike say nothing of how far others may be off"
    )


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (2.0, 3.0), (30.0, 10.0)])
def test_intervals_of_several_binary_answers_an_item_cover_the_truth(alpha, beta):
    """Items of different difficulty, each answered four times."""
    rng, covered = random.Random(1), 0
    for _ in range(400):
        chances = [rng.betavariate(alpha, beta) for _ in range(40)]
        rows = [[float(rng.random() < chance) for _ in range(4)] for chance in chances]
        low, high = interval(rows) or (nan, nan)
        covered += low <= alpha / (alpha + beta) <= high
    assert 0.92 <= covered / 400 <= 0.99


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
    for view in map(EvaluationView.from_json, views):
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
    found = EvaluationView.from_json(old)
    assert found.score_low is None and found.score != found.score
    assert EvaluationView.model_validate(found.model_dump()).pass_at == {}
