"""A run that chooses its placement by its own steps, on a real fleet."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 10


@pytest.mark.nightly  # quick: test_autoplan.py
def test_a_run_measures_both_placements_and_says_what_it_chose(fleet, spec_of):
    spec = spec_of(
        steps=STEPS, placement={"mode": "auto", "measure_steps": 1}, checkpoint={"interval_steps": 4}
    )
    run = fleet.succeed(fleet.submit(spec))
    assert run.recoveries == 0 and len(audit(fleet, run).trained) == STEPS * BATCH
    adopted = [event.data for event in fleet.client.events(run.id) if event.type == "plan_adopted"]
    tried, chosen = adopted[0], next(plan for plan in adopted if plan.get("predicted_s"))
    assert (tried["mode"], tried["from_step"], tried.get("predicted_s", {})) == ("disaggregated", 3, {})
    assert chosen["from_step"] >= 5 and chosen["predicted_s"]["step"] > 0
    known = {*chosen["alternatives"], chosen["reason"]}
    for words in ("collocated offloaded", "collocated resident", "disaggregated pipelined", "hybrid"):
        assert any(each.startswith(words) for each in known), f"{words} is compared"
    plan = fleet.client.plan(run.id)
    assert plan["chosen_by"] == "auto" and plan["mode"] == adopted[-1]["mode"]
    works = {
        step.step: [
            {device for device, stages in step.devices.items() if name in stages}
            for name in ("generate", "learn")
        ]
        for step in fleet.client.metrics(run.id)
    }
    assert works[2][0] == works[2][1], "in turns on the same devices"
    assert not works[4][0] & works[4][1], "side by side"
    _every_device_second_has_one_label(fleet, run.id)


def _every_device_second_has_one_label(fleet, run):
    shown = fleet.json("run", "timeline", run, "--steps", "30")
    spans, devices = shown["timeline"]["labels"], set()
    for step in shown["timeline"]["parts"]:
        within = [span for span in spans if step["start"] <= span["start"] < step["end"] and span["devices"]]
        devices |= {device for span in within for device in span["devices"]}
        spent = sum((span["end"] - span["start"]) * len(span["devices"]) for span in within)
        assert spent == pytest.approx(2 * (step["end"] - step["start"]), rel=1e-3)
    assert len(devices) == 2
    assert {"decode", "train", "sync", "switch"} <= {span["label"] for span in spans}
    assert {span["stage"] for span in spans if not span["devices"]} == {"score"}
    assert "█ decode" in fleet.headrace("run", "timeline", run).stdout


@pytest.mark.nightly  # test_autoplan sees in virtual time that the plan changes and steps get faster
def test_a_stage_that_a_failpoint_slows_is_seen_and_predicted_anew(own_fleet, spec_of):
    """From some decode round on each takes half a second: no contention, so that it is slower on any machine."""
    steps = 45
    with own_fleet(HEADRACE_FAILPOINTS="rollout.round=delay:0.5@100+") as fleet:
        fleet.ready("rollout-0", "trainer-0", "reward-0")
        placement = {"mode": "auto", "measure_steps": 1, "replan": "auto"}
        run = fleet.succeed(fleet.submit(spec_of(steps=steps, placement=placement, data__heldout=0)))
        adopted = [event.data for event in fleet.client.events(run.id) if event.type == "plan_adopted"]
        chosen = next(plan for plan in adopted if plan.get("predicted_s"))
        drifts = [plan for plan in adopted if "of what was predicted" in plan["reason"]]
        assert drifts and drifts[-1]["from_step"] > chosen["from_step"], adopted
        plan = fleet.client.plan(run.id)
        assert plan["predicted_s"]["generate"] > 2 * chosen["predicted_s"]["generate"], adopted
        assert plan["predicted_s"]["step"] == pytest.approx(plan["measured_s"]["step"], rel=0.5)
        assert len(audit(fleet, run).trained) == steps * BATCH
