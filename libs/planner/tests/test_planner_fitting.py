"""Profiles fitted from points, and length distributions."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from headrace_planner import (
    DeviceKind,
    Lengths,
    Memory,
    PlanError,
    Point,
    Profile,
    Workload,
    fit,
    reasoning,
)
from headrace_planner.cluster.sampling import draw
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(0, 50), st.floats(0.01, 5), st.sampled_from([1, 2]), st.booleans())
def test_a_law_is_found_again_from_its_points(fixed, item, replica, long_tail):
    law = Profile(
        "generate",
        fixed_s=fixed,
        item_s=item,
        replica_devices=replica,
        lengths=LENGTHS if long_tail else None,
    )
    points = [Point(items, 8, law.seconds(items, 8)) for items in (16, 64, 256)]
    template = Profile("generate", item_s=1.0, replica_devices=replica, lengths=law.lengths)
    found = fit(template, points)
    assert found.seconds(512, 16) == pytest.approx(law.seconds(512, 16), rel=1e-6)
    assert found.error < 1e-6


def test_noise_is_reported_as_the_worst_error():
    law = Profile("learn", fixed_s=2, item_s=1)
    points = [
        Point(n, 4, law.seconds(n, 4) * factor) for n, factor in ((8, 1.1), (32, 0.9), (64, 1.1), (128, 0.9))
    ]
    found = fit(Profile("learn", item_s=1.0), points)
    assert 0.05 < found.error < 0.15
    assert found.error == pytest.approx(max(abs(found.seconds(p.items, 4) / p.seconds - 1) for p in points))


def test_memory_and_concurrency_are_fitted():
    law = Profile("generate", fixed_s=3, item_s=0.5, memory=Memory(40, 6, 0.25))
    points = [
        Point(
            n,
            4,
            Profile("generate", fixed_s=3, item_s=0.5, max_concurrency=limit).seconds(n, 4),
            limit,
            46 + 0.25 * min(n / 4, limit),
        )
        for n, limit in ((16, 8), (64, 8), (64, 16), (256, 32))
    ]
    found = fit(Profile("generate", item_s=1.0, memory=Memory(40)), points)
    assert (found.fixed_s, found.item_s) == pytest.approx((3, 0.5))
    assert (found.memory.device_bytes, found.memory.item_bytes) == pytest.approx((6, 0.25))
    assert found.seconds(256, 4, 46 + 0.25 * 32) == pytest.approx(law.seconds(256, 4, 46 + 0.25 * 32))


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([Point(8, 1, 1.0), Point(16, 1, 2.0)], ["stages.learn.points", "2 points", "at least 3"]),
        ([Point(8, 1, 1.0)] * 3, ["stages.learn.points", "8 items a device"]),
        ([Point(8, 1, 1.0), Point(9, 1, 1.0), Point(10, 1, 0.0)], ["stages.learn.points[2]", "in 0 s"]),
    ],
)
def test_points_that_do_not_suffice_are_refused(points, words):
    with pytest.raises(PlanError) as refused:
        fit(Profile("learn", item_s=1.0), points)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_the_tail_makes_generation_slower_than_its_mean():
    flat = Profile("generate", fixed_s=10, item_s=0.1)
    tailed = Profile("generate", fixed_s=10, item_s=0.1, lengths=LENGTHS)
    longest = LENGTHS.expected_longest(64)
    assert 1 < longest < LENGTHS.stretch
    assert tailed.seconds(64, 8) == pytest.approx(flat.seconds(64, 8) + 10 * (longest - 1))


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("items", [16, 512, 8192])
def test_the_longest_output_is_the_mean_of_the_drawn_longest(items, correlation):
    """Against the draws of the simulated cluster, which takes whole groups by another way."""
    lengths = Lengths(LENGTHS.values, correlation, 16)
    work = Workload(
        reasoning(group_size=16, infer=False),
        {"generate": Profile("generate", item_s=1.0, lengths=lengths)},
        {"gpu": DeviceKind(8)},
        items,
    )
    drawn = [max(draw(work, seed, 0).lengths["generate"]) for seed in range(200 if items < 8192 else 10)]
    assert lengths.expected_longest(items) == pytest.approx(fmean(drawn), rel=0.06)


def test_fewer_outputs_end_earlier_and_arrive_by_the_same_distribution():
    few, many = (LENGTHS.arrivals(1.0, 0.0, 1, 8, count) for count in (32, math.inf))
    ends = [LENGTHS.expected_longest(count) for count in (32, math.inf)]
    assert ends[0] < 0.9 * ends[1] and ends[1] == LENGTHS.stretch
    assert few[-1] == many[-1] == pytest.approx(1.0)
    assert [share * ends[0] for share in few[:4]] == pytest.approx([share * ends[1] for share in many[:4]])


def test_groups_of_independent_lengths_arrive_later():
    alike = Lengths(LENGTHS.values, 1.0).arrivals(1.0, 1.0, 16, 8)
    apart = Lengths(LENGTHS.values, 0.0).arrivals(1.0, 1.0, 16, 8)
    assert alike[-1] == apart[-1] == pytest.approx(1.0)
    assert all(late > early for early, late in zip(alike[:-1], apart[:-1], strict=True))
    assert list(alike) == sorted(alike)


def test_a_limit_cuts_the_tail_and_keeps_the_mean():
    cut = LENGTHS.scaled(mean=9300, limit=20480)
    assert cut.mean == pytest.approx(9300, rel=1e-3) and cut.values[-1] == 20480
    assert cut.stretch < LENGTHS.stretch
    with pytest.raises(PlanError, match="not below the limit"):
        LENGTHS.scaled(mean=100, limit=100)


@pytest.mark.parametrize("quantiles", [{0.5: 60}, {0.5: 60, 1: 50}, {}])
def test_quantiles_that_are_no_distribution_are_refused(quantiles):
    with pytest.raises(PlanError, match=r"lengths\.quantiles"):
        Lengths.from_quantiles(quantiles)
