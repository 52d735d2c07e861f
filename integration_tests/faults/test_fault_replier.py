"""An instance of its own replies to a run's policy, and is killed while it does: it is replaced, no version is lost."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH
from headrace.client import Workflow

pytestmark = pytest.mark.nightly
STEPS = 4


@pytest.fixture
def pair(own_fleet):
    """Two rollouts whose engines take their time, so that a kill is in the middle of a step."""
    with own_fleet("--rollout", "2", HEADRACE_FAILPOINTS="rollout.round=delay:0.02") as fleet:
        fleet.ready("rollout-0", "rollout-1", "trainer-0", "reward-0")
        yield fleet


@pytest.mark.parametrize(
    "placement", [{"rollout,trainer": "0", "reply": "1"}, {"rollout": "0", "reply,trainer": "1"}]
)
def test_a_killed_replier_is_replaced_and_costs_no_version(pair, spec_of, tiny_model, placement):
    flow = Workflow()
    exchange = flow.reply(
        flow.answers, path=str(tiny_model), turns=2, before=" 0", after="=", max_new_tokens=3
    )
    flow.learn(flow.score(exchange))
    spec = flow.into(spec_of(steps=STEPS))
    spec["placement"] = placement
    run = pair.submit(spec)
    pair.reach(run, 1)
    killed = pair.kill("rollout-1")
    run = pair.succeed(run)
    pair.replaced("rollout-1", killed)
    found = audit(pair, run)
    assert len(found.trained) == STEPS * BATCH and found.rewinds == 0
    answers = pair.client.trajectories(run.id, limit=1000)
    assert all(each.completion.count("=") >= 2 for each in answers)
    assert all(certificate.log_prob_mismatch_mean < 1e-3 for certificate in found.live)
    steps = pair.client.metrics(run.id)
    assert all(step.stage_s["reply"] > 0 and step.stage_s["own turn"] > 0 for step in steps)
    replied = {device for step in steps for device, stages in step.devices.items() if "reply" in stages}
    assert {device.rpartition(":")[2] for device in replied} == {"1"}
    holds = pair.client.timeline(run.id, steps=STEPS)["holds"]
    assert {hold["instance"] for hold in holds if hold["stage"] == "reply"} == {"rollout-1"}
