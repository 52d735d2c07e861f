"""What the stages of a run cost, measured on a real fleet, stored, and planned from."""

from __future__ import annotations

import json

import pytest
import yaml
from harness.specs import BATCH
from headrace.client import Workflow


def test_a_measured_profile_is_stored_and_planned_from(fleet, spec_of, tmp_path):
    spec = tmp_path / "profiled.yaml"
    spec.write_text(yaml.safe_dump(spec_of(steps=2, sampling__max_new_tokens=5)))
    fleet.succeed(fleet.submit(yaml.safe_load(spec.read_text())))
    lacking = fleet.headrace("profile", spec, "--stored")
    assert lacking.returncode == 2 and "stages.generate.points: 1 points" in lacking.stderr, lacking.stderr

    found = fleet.json("profile", spec, "--steps", "1")
    stages = found["profile"]["stages"]
    for stage in ("generate", "learn"):
        points = stages[stage]["points"]
        assert [point["items"] for point in points] == [BATCH, 2 * BATCH, 3 * BATCH]
        assert all(point["devices"] == 2 and point["seconds"] > 0 for point in points)
    assert stages["score"]["kind"] == "host" and set(found["fit_errors"]) == {"generate", "score", "learn"}
    assert max(stages["generate"]["lengths"]["quantiles"].values()) <= 5

    plan = fleet.json("plan", spec, "--devices", "2")
    assert plan["devices"] == {"cpu": 2, "host": 1} and plan["profile"] == found["profile"]["about"]
    stages["learn"] = {"kind": "cpu", "item_s": 100.0}
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(found["profile"]))
    edited = fleet.headrace("plan", spec, "--devices", "2", "--profile", tmp_path / "edited.yaml", "--json")
    assert json.loads(edited.stdout)["step_s"] > max(plan["step_s"], 100.0)


@pytest.mark.nightly
def test_a_policy_that_replies_on_a_device_of_its_own_is_a_stage_of_its_own(
    own_fleet, spec_of, tiny_model, tmp_path
):
    flow = Workflow()
    flow.learn(flow.score(flow.reply(flow.answers, path=str(tiny_model), turns=2, max_new_tokens=3)))
    spec = tmp_path / "pair.yaml"
    pair = flow.into(spec_of(steps=2, sampling__max_new_tokens=5))
    pair["placement"] = {"rollout,trainer": "0", "reply": "1"}
    spec.write_text(yaml.safe_dump(pair))
    with own_fleet("--rollout", "2") as fleet:
        fleet.ready("rollout-0", "rollout-1", "trainer-0", "reward-0")
        found = fleet.json("profile", spec, "--steps", "1")["profile"]
        for stage in ("generate", "reply", "learn"):
            points = found["stages"][stage]["points"]
            assert [point["items"] for point in points] == [BATCH, 2 * BATCH, 3 * BATCH]
            assert all(point["devices"] == 1 and point["seconds"] > 0 for point in points)
        plan = fleet.json("plan", spec, "--devices", "2")
    assert plan["profile"] == found["about"]
