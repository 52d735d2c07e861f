"""What the soak calls growth."""

import pytest
from soak import MOST, growth


@pytest.mark.parametrize(
    ("values", "found"),
    [([5.0] * 5, 1.0), ([9, 9, 4, 4, 4, 4], 1.0), ([1, 1, 2, 2, 4, 4], 2.0), ([*range(90, 120)], 1.096)],
)
def test_growth_leaves_the_start_out_and_no_single_look_counts(values, found):
    assert growth(values) == pytest.approx(found, abs=0.02)


def test_a_leak_of_a_fifth_in_a_third_of_the_time_is_above_every_bound():
    assert all(growth([100.0 * 1.2 ** (at / 10) for at in range(30)]) > most for most in MOST.values())
