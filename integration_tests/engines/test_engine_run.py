"""A whole run with the engine that ENGINE names, on the real services: the tiny model copies digits."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, run_python

ENGINE = os.environ.get("ENGINE", "")
LONGEST_S = 420.0


@pytest.mark.timeout(LONGEST_S + 120)
@pytest.mark.skipif(not ENGINE, reason="ENGINE is not set; make test-engines ENGINE=vllm runs this")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"steps": 4, "evaluation": {"every": 0}}, id="a few steps"),
        pytest.param({}, id="learns", marks=pytest.mark.nightly),
    ],
)
def test_the_tiny_model_with_the_engine(tmp_path, changes: dict[str, Any]):
    model = tmp_path / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", model, "--head-dim", "32")
    spec = yaml.safe_load((ROOT / "examples" / f"tiny-{ENGINE}.yaml").read_text())
    spec["model"]["path"] = str(model)
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) else value
    with Fleet(tmp_path / "data", "--engine", ENGINE) as fleet:
        run = fleet.succeed(fleet.submit(spec), LONGEST_S)
        found = audit(fleet, run)
        slots = spec["algorithm"]["prompts_per_step"] * spec["algorithm"]["group_size"]
        assert len(found.trained) == spec["steps"] * slots and found.rewinds == 0
        # What the engine says of its tokens is what the trainer computes of them.
        assert all(
            item.log_prob_compared_tokens and item.log_prob_mismatch_mean < 1e-3 for item in found.live
        )
        if not changes:
            before, *_, after = run.evaluations
            assert after.step == spec["steps"] and after.score > before.score
        log = (fleet.data_dir / "logs" / "rollout-0.log").read_text()
    if ENGINE == "vllm":  # It slept between its turns: one engine made every step.
        assert len(set(re.findall(r"EngineCore pid=(\d+)", log))) == 1
