"""The simulator's and the elastic policy's benchmarks: their figures come from what they name."""

from __future__ import annotations

import pytest
from _transfers import ASSUMPTIONS, MEASUREMENTS, load, values_of
from elastic import compare, move_costs
from simulator import simulated, timelines, transfers


@pytest.fixture(scope="module")
def data():
    return load(MEASUREMENTS)


def test_transfers_are_simulated_near_their_predictions(data):
    found = transfers(data, values_of(load(ASSUMPTIONS)), iterations=1, seed=0)
    assert found["rankings_right_simulated"] == 1
    assert found["simulated_vs_predicted"] < 0.1
    assert found["mean_error_transfers_simulated"] < 0.15


def test_only_published_timelines_are_compared(data):
    made = list(timelines(data))
    assert [kind for kind, _, _ in made].count("moe") == 3
    _, case, published = made[0]
    ends = simulated(case, values_of(load(ASSUMPTIONS)), iterations=1, seed=0)
    assert 0 < ends.begin < ends.rollout < ends.end
    assert published.end == 791


def test_the_static_side_is_the_fastest_mode_and_nothing_beats_the_ideal(data):
    found = compare(data, devices=16, items=256, iterations=1, seed=1, costs=move_costs(data))
    assert found.ideal_s < found.bound_s < found.static[0]
    for helper, (elastic_s, _) in found.elastic.items():
        assert elastic_s > found.bound_s
        assert 0.8 < found.speedup(helper) < 2
