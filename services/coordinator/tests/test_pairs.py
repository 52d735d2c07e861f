"""Figures of an evaluation by item, and paired comparisons of two."""

import random
from itertools import combinations
from statistics import fmean

import pytest
from headrace_coordinator.domain.estimates import bootstrap, compare, item_values, mcnemar

REWARDS = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
CHOICES = [["7", "3", "7", ""], ["2", "2", "5", "5"]]


def test_average_takes_the_first_k():
    assert item_values("greedy", REWARDS, CHOICES, 1.0) == [1.0, 0.0]
    assert item_values("avg@2", REWARDS, CHOICES, 1.0) == [0.5, 0.0]
    assert item_values("avg@4", REWARDS, CHOICES, 1.0) == [0.5, 0.25]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_is_the_mean_over_all_choices_of_k_answers(k):
    drawn = [fmean(max(chosen) for chosen in combinations(each, k)) for each in REWARDS]
    assert item_values(f"pass@{k}", REWARDS, CHOICES, 1.0) == pytest.approx(drawn)


def test_majority_votes_by_what_was_extracted():
    assert item_values("maj@4", REWARDS, CHOICES, 1.0) == [1.0, 0.0], "of a tie the earliest choice wins"
    assert item_values("maj@1", REWARDS, CHOICES, 1.0) == [1.0, 0.0]
    silent = item_values("maj@2", [[1.0, 0.0]], [["", ""]], 1.0)
    assert silent == [0.5], "where nothing was extracted, every answer is as good as another"


def test_mcnemar_is_exact():
    """Ten discordant pairs, one against nine: 2 * (1 + 10) / 1024."""
    assert mcnemar(9, 1) == mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0


def test_binary_figures_have_a_test_and_others_an_interval_alone():
    found = compare([0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0])
    assert (found.wins, found.losses, found.ties, found.p_value) == (2, 1, 1, 1.0)
    assert found.second - found.first == pytest.approx(0.25)
    assert found.low is not None and found.low < 0.25 < found.high
    assert compare([0.5, 0.0], [0.0, 0.0]).p_value is None


def test_the_interval_of_a_difference_covers_the_truth_and_repeats():
    rng = random.Random(3)
    covered = 0
    for _ in range(30):
        gaps = [rng.gauss(0.1, 1.0) for _ in range(25)]
        low, high = bootstrap(gaps)
        covered += low <= 0.1 <= high
    assert covered >= 24
    assert bootstrap(gaps) == (low, high)


def test_equal_differences_leave_a_width_by_the_number_of_items():
    """None of 20 items differs: as many may as Wilson's interval of 0 of 20 ends at, in either direction."""
    assert bootstrap([0.0] * 20) == pytest.approx((-0.1611, 0.1611), abs=1e-4)
    assert bootstrap([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert bootstrap([3.0] * 20) is None
    found = compare([1.0] * 50, [1.0] * 50)
    assert found.low is not None and found.low < 0.0 < (found.high or 0.0)


def test_one_item_has_no_interval():
    assert bootstrap([1.0]) is None
    assert compare([1.0], [0.0]).low is None
