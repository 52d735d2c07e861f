"""Asynchronous steps: the prediction against arithmetic by hand and against the simulated cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Lengths,
    Memory,
    PlanError,
    Point,
    Profile,
    Sync,
    Workflow,
    Workload,
    embodied,
    fit,
)
from headrace_planner.asynchronous import best_period, ending_staleness, enough_staleness, period, sides
from headrace_planner.cluster.asynchronous import simulate_async
from headrace_planner.cluster.sampling import Draws
from headrace_planner.documents import PlanRequest
from headrace_planner.explaining import explain

GROUP = 4
TAIL = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260})


def workload(items=64, *, lengths=TAIL, learn_s=0.4, sync_s=0.0, barrier=Granularity.GROUP, **generate):
    profiles = {
        "generate": Profile("generate", **{"fixed_s": 10.0, "item_s": 0.5, "lengths": lengths, **generate}),
        "learn": Profile("learn", item_s=learn_s),
        "score": Profile("score", "host", item_s=1e-9),
    }
    edges = (Edge("generate", "score"), Edge("score", "learn", barrier))
    workflow = Workflow("grpo", ("generate", "score", "learn"), edges, (("learn", "generate"),), GROUP)
    devices = {"gpu": DeviceKind(8, 100.0), "host": DeviceKind(1)}
    return Workload(workflow, profiles, devices, items, Sync(between_s=sync_s))


def test_a_slow_learner_is_the_whole_period():
    """16 items a device and 2 s each: 32 s, whatever the generator takes."""
    made = period(workload(learn_s=2.0), 4, 4, 4)
    assert made.seconds == pytest.approx(32.0) and made.wait_s == 0
    assert made.learn_s == pytest.approx(32.0)
    equal = [Draws({"generate": [TAIL.values[399 * n // 63] / TAIL.mean for n in range(64)]}, [1.0] * 64)]
    assert simulate_async(workload(learn_s=2.0), 4, 4, 4, given=equal).step_s == pytest.approx(32.0)


def test_the_tail_bounds_the_period_by_the_open_steps():
    """By hand: every output takes L = 4 mean lengths or 1; (k + 1) T = L fixed / (1 - each q / T) + last group."""
    tail = Lengths((1.0,) * 9 + (11.0,))
    work = workload(lengths=tail, learn_s=0.4, sync_s=1.0)
    longest, q, last = tail.expected_longest(64), 16, 0.4 * 64 / 4 * GROUP / 64
    for bound in (1, 2, 3):
        made = period(work, 4, 4, bound)
        rate = 10.0 / (1 - 0.5 * q / made.seconds)
        assert (bound + 1) * made.seconds == pytest.approx(longest * rate + last + 1.0, rel=1e-6)
        assert made.wait_s == pytest.approx(made.seconds - max(made.learn_s, 0.5 * q))
    assert period(work, 4, 4, 0).seconds > period(work, 4, 4, 1).seconds > period(work, 4, 4, 3).seconds


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize(("generating", "learn_s"), [(4, 0.4), (6, 0.4), (4, 2.0), (2, 0.2)])
def test_prediction_and_simulated_cluster_agree(bound, generating, learn_s):
    """On drawn lengths, of 24 steps."""
    work = workload(256, learn_s=learn_s, sync_s=0.5)
    made = period(work, generating, 8 - generating, bound)
    found = simulate_async(work, generating, 8 - generating, bound, iterations=24, seed=3)
    assert found.step_s == pytest.approx(made.seconds, rel=0.12)


def test_a_long_tail_makes_the_trainer_wait_until_the_bound_is_large_enough():
    tail = Lengths((1.0,) * 63 + (40.0,))
    work = workload(256, lengths=tail, learn_s=0.4, fixed_s=4.0, item_s=0.1)
    given = [Draws({"generate": [value / tail.mean for value in tail.values] * 4}, [1.0] * 256)]
    waited = {k: simulate_async(work, 4, 4, k, iterations=6, given=given) for k in (0, 1, 4)}
    assert waited[0].waited_share == 1 and waited[0].wait_share > waited[1].wait_share > 0.2
    enough = enough_staleness(work, 4, 4)
    assert enough is not None and enough > 1
    assert simulate_async(work, 4, 4, enough, iterations=6, given=given).wait_share < 0.05
    assert period(work, 4, 4, enough - 1).wait_s > 0.01 * period(work, 4, 4, enough - 1).seconds


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_measured_waits_name_the_bound_that_ends_them(bound):
    """Of a simulated run with that bound: the one that the prediction names, or one less, as decoding slows down."""
    tail = Lengths((1.0,) * 63 + (40.0,))
    work = workload(256, lengths=tail, learn_s=0.4, fixed_s=4.0, item_s=0.1)
    given = [Draws({"generate": [value / tail.mean for value in tail.values] * 4}, [1.0] * 256)]

    def simulated(k):
        return simulate_async(work, 4, 4, k, iterations=6, given=given)

    found = ending_staleness([(step.seconds, step.wait_tail_s) for step in simulated(bound).steps], bound)
    assert found is not None and found > bound
    enough = enough_staleness(work, 4, 4)
    assert enough is not None and enough - 1 <= found <= enough
    assert simulated(found).wait_share < simulated(bound).wait_share / 2


def test_steps_without_a_wait_need_no_other_bound_and_endless_ones_have_none():
    assert ending_staleness([(4.0, 0.0), (5.0, 0.01)], 2) == 2
    assert ending_staleness([(4.0, 1.0), (3.0, 0.0), (4.0, 1.0)], 1) == 2
    assert ending_staleness([(40.0, 39.0)] * 3, 1) is None
    assert ending_staleness([], 3) == 3


def test_no_output_lags_further_than_the_bound_and_all_are_learned():
    work = workload(64)
    for bound in (0, 1, 3):
        found = simulate_async(work, 4, 4, bound, iterations=5)
        lags = [lag for step in found.steps for lag in step.staleness]
        assert len(lags) == 5 * 64 and min(lags) >= 0 and max(lags) == bound
        assert 0 <= found.staleness_mean <= bound


def test_with_equal_lengths_a_synchronous_step_is_the_sum_by_hand():
    """One length: all end at 10 + 0.5 * 16 = 18 s; then 64 items of 0.4 s on 4 devices, 6.4 s, and a sync of 1 s."""
    work = workload(lengths=Lengths((1.0,)), sync_s=1.0)
    given = [Draws({"generate": [1.0] * 64}, [1.0] * 64)]
    found = simulate_async(work, 4, 4, 0, iterations=3, given=given)
    # Replicas decode nothing while a version is installed, after the learner has waited for that install.
    assert [step.seconds for step in found.steps] == pytest.approx([18 + 6.4 + 1 + 1] * 3)
    assert period(work, 4, 4, 0).seconds == pytest.approx(18 + 6.4 + 1)


def test_a_batch_barrier_waits_for_all_of_its_step():
    work = workload(256, barrier=Granularity.BATCH)
    streamed, whole = (simulate_async(each, 4, 4, 0, iterations=2) for each in (workload(256), work))
    assert whole.step_s > streamed.step_s
    assert period(work, 4, 4, 1).seconds >= period(workload(256), 4, 4, 1).seconds


def test_memory_limits_what_is_in_flight():
    limited = workload(256, memory=Memory(item_bytes=10.0))
    made = period(limited, 4, 4, 4)
    assert made.seconds >= 10 * 64 / 10 + 0.5 * 64  # ten at a time: 6.4 rounds of the fixed cost
    assert simulate_async(limited, 4, 4, 4, iterations=4).step_s == pytest.approx(made.seconds, rel=0.1)


def test_the_best_division_is_the_best_of_all():
    work = workload(256, learn_s=0.9)
    best = best_period(work, 2)
    assert best is not None
    every = [period(work, g, 8 - g, 2).seconds for g in range(1, 8)]
    assert best.seconds == min(every) == every[best.generating - 1]


def test_what_has_no_two_sides_is_refused_and_not_planned():
    turns = {
        "generate": Profile("generate", fixed_s=1, lengths=TAIL),
        "simulate": Profile("simulate", fixed_s=1),
        "learn": Profile("learn", item_s=1),
    }
    work = Workload(embodied(), turns, {"gpu": DeviceKind(8)}, 8)
    assert sides(work) is None and best_period(work, 1) is None
    with pytest.raises(PlanError, match="no generator with lengths"):
        period(work, 4, 4, 1)
    with pytest.raises(PlanError, match="use 0 to 16"):
        period(workload(), 4, 4, 17)
    with pytest.raises(PlanError, match="does not fit"):
        simulate_async(workload(memory=Memory(state_bytes=1e9)), 4, 4, 1)
    assert math.isinf(period(workload(memory=Memory(state_bytes=1e9)), 4, 4, 1).seconds)


def test_a_plan_shows_asynchronous_steps_and_the_run_s_own_bound():
    stage = {"quantiles": {0.5: 60, 0.9: 111, 1: 260}}
    document = {
        "workflow": {"group_size": 4},
        "items": 64,
        "profile": {
            "stages": {
                "generate": {"fixed_s": 10, "item_s": 0.5, "lengths": stage},
                "score": {"kind": "host", "item_s": 0.001},
                "learn": {"item_s": 0.4},
            }
        },
        "cluster": {"gpu": {"count": 8}, "host": {"count": 1}},
        "simulation": {"iterations": 2},
    }
    found = explain(PlanRequest.model_validate({**document, "max_staleness": 3}))
    beside = found["asynchronous"]
    assert [row["max_staleness"] for row in beside["by_staleness"]] == [1, 2, 3, 4]
    own = next(row for row in beside["by_staleness"] if row["max_staleness"] == 3)
    assert beside["max_staleness"] == 3 and beside["step_s"] == own["step_s"] < found["step_s"]
    assert 0 <= own["waited_time_share"] <= own["waited_steps_share"] <= 1
    plain = explain(PlanRequest.model_validate({**document, "simulation": None}))
    assert (
        plain["asynchronous"]["max_staleness"] == 1
        and "simulated_s" not in plain["asynchronous"]["by_staleness"][0]
    )


@pytest.mark.parametrize("power", [0.6, 1.3])
def test_a_pace_that_is_no_line_is_simulated_as_it_is_predicted(power):
    """One length, 16 items on each of four replicas: 10 + 0.5 * 16 ** power seconds, by either."""
    work = workload(lengths=Lengths((1.0,)), batch_power=power)
    own = 10 + 0.5 * 16**power
    assert work.profiles["generate"].seconds(64, 4) == pytest.approx(own)
    given = [Draws({"generate": [1.0] * 64}, [1.0] * 64)]
    assert simulate_async(work, 4, 4, 0, iterations=1, given=given).step_s == pytest.approx(own + 6.4)
    drawn = workload(256, batch_power=power, sync_s=0.5)
    made = period(drawn, 4, 4, 2)
    assert simulate_async(drawn, 4, 4, 2, iterations=24, seed=3).step_s == pytest.approx(
        made.seconds, rel=0.15
    )


def test_fits_keep_a_given_power():
    law = Profile("generate", fixed_s=4.0, item_s=0.3, batch_power=0.7, lengths=TAIL)
    points = [Point(items, 4, law.seconds(items, 4)) for items in (16, 64, 256)]
    found = fit(Profile("generate", item_s=1.0, batch_power=0.7, lengths=TAIL), points)
    assert found.fixed_s == pytest.approx(4.0) and found.item_s == pytest.approx(0.3) and found.error < 1e-9


def test_the_simulated_cluster_repeats_itself():
    work = replace(workload(64), items=64)
    assert simulate_async(work, 4, 4, 2, seed=5) == simulate_async(work, 4, 4, 2, seed=5)
    assert simulate_async(work, 4, 4, 2, seed=5) != simulate_async(work, 4, 4, 2, seed=6)
