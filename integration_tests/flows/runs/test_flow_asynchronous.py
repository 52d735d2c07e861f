"""Runs whose next answers are made while a step is learned, on a real fleet of two devices."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 8


def lags(found):
    """Worst staleness of the certificates, and the mean over steps."""
    return (
        max(item.max_staleness for item in found.live),
        sum(item.mean_staleness for item in found.live) / len(found.live),
    )


@pytest.mark.parametrize("stale", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_hybrid_lends_the_rollouts_devices_once_their_credit_is_used_up(fleet, spec_of, stale):
    """Learning takes longer than generating: devices change hands, and every answer is learned once."""
    run = fleet.submit(
        spec_of(
            steps=STEPS,
            algorithm={"max_staleness": stale, "options": {"epochs": 4, "minibatches": 2}},
            placement={"mode": "hybrid"},
            evaluation__every=4,
        )
    )
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == STEPS * BATCH and not found.dropped and not found.rewinds
    worst, mean = lags(found)
    assert 1 <= worst <= stale and mean > 0
    holds = fleet.client.timeline(run.id)["holds"]
    learned = {tuple(hold["devices"]) for hold in holds if hold["stage"] == "learn"}
    assert any(len(devices) == 2 for devices in learned), "the trainer never had both devices"
    assert any(len(devices) == 1 for devices in learned), "generation never went on beside it"
    assert fleet.client.get(run.id).recoveries == 0


@pytest.mark.nightly  # quick: test_autoplan.py, test_planner_asynchronous.py
def test_auto_predicts_the_steps_of_a_run_that_works_ahead(fleet, spec_of):
    run = fleet.submit(
        spec_of(
            steps=STEPS,
            algorithm__max_staleness=1,
            placement={"mode": "auto", "measure_steps": 2},
        )
    )
    ended = fleet.succeed(run)
    assert len(audit(fleet, ended).trained) == STEPS * BATCH and ended.recoveries == 0
    plan = fleet.client.plan(run.id)
    assert (plan["chosen_by"], plan["mode"]) == ("auto", "disaggregated")
    assert "hybrid is not tried with max_staleness" in plan["reason"]
    # Measured, as nothing can be divided otherwise on two devices: of the size of the run's steps. The first two are
    # what was measured: on a busy machine they may take much longer than all that come then.
    seconds = sorted(step.wall_s for step in fleet.client.metrics(run.id))
    predicted = plan["predicted_s"]
    assert seconds[0] / 5 <= predicted["step"] <= seconds[-1] * 5
    assert 0 < predicted["learn"] <= predicted["step"] and 0 < predicted["generate"] <= predicted["step"]
