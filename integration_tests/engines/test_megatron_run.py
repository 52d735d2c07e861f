"""A whole run whose trainers are megatron-core's, two ranks that divide each layer: it learns, also after a kill."""

from __future__ import annotations

import os

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, run_python

LONGEST_S = 420.0


@pytest.mark.timeout(LONGEST_S + 180)
@pytest.mark.skipif("MEGATRON" not in os.environ, reason="MEGATRON is not set: make test-megatron runs this")
def test_the_tiny_model_learns_in_two_tensor_parallel_ranks_one_of_which_is_killed(tmp_path):
    model = tmp_path / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", model)
    spec = yaml.safe_load((ROOT / "examples" / "tiny-megatron.yaml").read_text())
    spec["model"]["path"] = str(model)
    spec["checkpoint"] = {"interval_steps": 10}
    with Fleet(tmp_path / "data", "--backend", "megatron", "--trainer", "2") as fleet:
        run = fleet.submit(spec)
        fleet.reach(run, 15)
        fleet.kill("trainer-1")
        run = fleet.succeed(run, LONGEST_S)
        found = audit(fleet, run)
        slots = spec["algorithm"]["prompts_per_step"] * spec["algorithm"]["group_size"]
        assert len(found.trained) == spec["steps"] * slots and found.rewinds == 1
        # What the engine says of its tokens is what the trainer computes of them.
        assert all(
            item.log_prob_compared_tokens and item.log_prob_mismatch_mean < 1e-3 for item in found.live
        )
        before, *_, after = run.evaluations
        assert after.step == spec["steps"] and after.score > before.score
