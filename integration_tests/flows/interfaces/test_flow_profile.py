"""What the stages of a run cost, measured on a real fleet, stored, and planned from."""

from __future__ import annotations

import json

import pytest
import yaml
from harness.specs import BATCH


@pytest.mark.nightly  # quick: test_cli_plan.py, test_planner_measured.py
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
