"""Two policies learn in one conversation, on two ranks and two rollouts, and processes die: both go on as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from harness.ledger import audit
from safetensors.torch import load_file

pytestmark = pytest.mark.nightly
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
STEPS, GROUPS, SAMPLES = 6, 4, 4


def test_a_killed_rank_and_a_killed_rollout_cost_neither_policy_a_step(own_fleet, tiny_model):
    spec = yaml.safe_load((EXAMPLES / "hint_policies.yaml").read_text(encoding="utf-8"))
    spec |= {"steps": STEPS, "data": {"heldout": 4}, "evaluation": {"every": 0}}
    spec |= {"checkpoint": {"interval_steps": 2}, "trainer": {"ranks": 2}, "rollout": {"instances": 2}}
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {"tasks": [f"{EXAMPLES / 'hint.py'}:Hint"], "count": 6}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    spec["sampling"]["stop"] = [*"02468 =+->:,.?"]
    slow = {"HEADRACE_FAILPOINTS": "rollout.round=delay:0.02"}
    with own_fleet("--simulator", "1", "--trainer", "2", "--rollout", "2", **slow) as fleet:
        fleet.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1", "reward-0", "simulator-0")
        run = fleet.submit(spec)
        fleet.reach(run, 2)
        killed = fleet.kill("rollout-1")
        fleet.replaced("rollout-1", killed)
        fleet.reach(run, 3)
        killed = fleet.kill("trainer-1")
        run = fleet.succeed(run)
        fleet.replaced("trainer-1", killed)
        found = audit(fleet, run)
        assert len(found.live) == STEPS and found.rewinds >= 1
        assert all(each.log_prob_mismatch_mean < 1e-3 for each in found.live)
        for step in fleet.client.metrics(run.id):
            for name in ("policy", "guesser"):
                assert step.figures[f"{name}/log_prob_mismatch_mean"] < 1e-3
        own, other = (
            load_file(Path(run.export_path) / below / "model.safetensors") for below in ("", "guesser")
        )
        assert any((own[name] - other[name]).abs().max() > 1e-5 for name in own)
