"""Profiles from measured steps: correlation of lengths within groups, and what is computed beside the devices."""

import math
import random

import pytest
from headrace_planner.documents import ProfileDocument
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.profiling.measured import MeasuredStep, group_correlation, profile_document


@pytest.mark.parametrize("independent", [16, 4, 2, 1])
def test_the_correlation_that_lengths_were_drawn_with_is_measured(independent):
    """A group's lengths are as many independent ones, repeated, as size ** (1 - correlation) says."""
    draw, size = random.Random(7), 16
    groups = []
    for _ in range(2000):
        drawn = [draw.randint(1, 400) for _ in range(independent)]
        groups.append([drawn[index % independent] for index in range(size)])
    wanted = 1 - math.log(independent) / math.log(size)
    assert group_correlation(groups) == pytest.approx(wanted, abs=0.02)


def test_a_measured_correlation_is_what_the_planner_expects_of_a_group():
    draw = random.Random(3)
    groups = [
        [draw.randint(1, 50) + shift for _ in range(8)] for shift in (draw.randint(0, 50) for _ in range(400))
    ]
    steps = [
        MeasuredStep(8 * n, {"generate": 2.0 * n, "learn": 1.0 * n}, {"generate": 2, "learn": 2}, True)
        for n in (1, 2, 3)
    ]
    made = profile_document({"generate": "rollout", "learn": "trainer"}, "gpu", steps, groups, "a test")
    section = made["stages"]["generate"]["lengths"]
    assert section["group_size"] == 8 and 0.2 < section["group_correlation"] < 0.9
    lengths = next(
        one.lengths for one in ProfileDocument.model_validate(made).made(group=8) if one.stage == "generate"
    )
    assert isinstance(lengths, Lengths)
    longest = sum(map(max, groups)) / len(groups)
    assert lengths.expected_longest(8) * lengths.mean == pytest.approx(longest, rel=0.05)


def test_simulators_work_on_the_host_beside_the_policy():
    steps = [
        MeasuredStep(
            n, {"generate": 0.2 * n, "simulate": 0.5 * n, "learn": 0.1 * n}, {"generate": 1, "learn": 1}, True
        )
        for n in (4, 8, 12)
    ]
    services = {"generate": "rollout", "simulate": "simulator", "learn": "trainer"}
    made = profile_document(services, "cpu", steps, [[5], [9], [7]], "a test")
    assert made["stages"]["simulate"] == {"kind": "host", "host_item_s": 0.5}
    assert "group_correlation" not in made["stages"]["generate"]["lengths"]
    assert {one.stage for one in ProfileDocument.model_validate(made).made()} == set(services)
