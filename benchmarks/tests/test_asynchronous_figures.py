"""Arithmetic of the scripts about running ahead and about the law of decoding, on figures made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from _async_here import AsyncHere, figures, spec_of
from _elastic_here import MODES
from _elastic_model import Measured
from _transfers import MEASUREMENTS
from asynchronous import fastest, moe, workloads
from decoding import POWERS, fitted
from headrace_planner.asynchronous import best_period
from headrace_schema.spec import RunSpec
from staleness import figures as learned


def steps(wall_s, generate, learn, tail=0.0):
    return [Measured(wall_s, {"generate": generate, "learn": learn, "wait for tail": tail}, (4, 4))] * 3


def test_the_asynchronous_step_is_compared_with_the_fastest_synchronous_and_with_the_slower_side():
    measured = {mode: steps(10.0, 6.0, 5.0) for mode in MODES}
    measured["elastic apart"] = steps(9.0, 6.0, 5.0)
    measured |= {"asynchronous 1": steps(7.5, 6.0, 5.5, tail=1.5), "asynchronous 4": steps(6.6, 6.0, 5.5)}
    found = figures(measured)
    assert found["async_vs_sync_here"] == pytest.approx(9.0 / 6.6)
    assert found["async_vs_sync_here_k1"] == pytest.approx(9.0 / 7.5)
    assert found["period_vs_ideal"] == pytest.approx(6.6 / 6.0)
    assert found["waited_share_k1"] == pytest.approx(0.2) and found["waited_share_k4"] == 0
    assert found["learn_over_generate_apart"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("bound", [1, 4])
def test_what_is_submitted_is_a_spec(bound):
    spec = RunSpec.model_validate(spec_of(AsyncHere(), Path("/models/none"), Path("/prompts"), bound))
    assert spec.algorithm.max_staleness == bound and spec.placement.mode == "disaggregated"


def test_published_workloads_can_run_ahead_and_gain_by_it():
    """The 7B runs and the mixture of experts, of 64 devices."""
    profile = Path(__file__).parents[2] / "examples" / "plans" / "profile_moe_30b_h100.yaml"
    found = dict(workloads(MEASUREMENTS, profile, 64))
    assert set(found) == {"64_7b_load_16", "64_7b_load_32", "64_7b_load_128", "64_30b"}
    work = moe({"stages": {"generate": {"fixed_s": 10, "item_s": 0.1, "lengths": {"quantiles": {0.5: 1, 1: 4}}},
                           "score": {"item_s": 0.001}, "learn": {"item_s": 0.3}}}, 8, 256)  # fmt: skip
    made = best_period(work, 2)
    assert made is not None and made.seconds < fastest(work, 1, 0)


def test_a_curve_s_own_law_is_found():
    points = [(n, 4.0 + 0.5 * n**0.6) for n in (1, 8, 64, 256)]
    found = fitted(points, POWERS)
    assert (found.power, found.error) == (pytest.approx(0.6), pytest.approx(0, abs=1e-9))
    assert found.fixed == pytest.approx(4.0) and found.each == pytest.approx(0.5)
    assert fitted(points, (1.0,)).error > 0.1


def test_what_staleness_costs_is_told_against_none():
    def run(after):
        return {"heldout_before": 0.1, "heldout_after": after, "worst_staleness": 0, "rewards": [0.1]}

    found = learned(
        {"k = 0": {"0": run(0.8), "1": run(0.6)}, "k = 4, not corrected": {"0": run(0.5), "1": run(0.5)}}
    )
    assert found["heldout_k0"] == pytest.approx(0.7)
    assert found["heldout_gap_k4_uncorrected"] == pytest.approx(0.2)
