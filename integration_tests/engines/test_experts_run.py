"""Whole runs of a tiny mixture of experts: it learns with divided experts, replayed routes and a balance loss."""

from __future__ import annotations

import json
import os

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, run_python

LONGEST_S = 900.0
CASES = {
    "fsdp": ("", ("--trainer", "2"), {}),
    "megatron": (
        "MEGATRON",
        ("--trainer", "2", "--backend", "megatron"),
        {"trainer": {"backend": "megatron"}},
    ),
    # vLLM tells routes with its second model runner alone, which is not for every CPU.
    "vllm": (
        "ENGINE",
        ("--trainer", "2", "--engine", "vllm"),
        {"rollout": {"engine": "vllm"}, "algorithm": {"options": {"balance_loss_coef": 0.001}}},
    ),
}
"""Name → the variable that says that its environment is there, the fleet's options, what differs in the spec."""


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 180)
@pytest.mark.parametrize("name", CASES)
def test_the_tiny_mixture_of_experts_learns(name, tmp_path):
    variable, options, changes = CASES[name]
    if variable and not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    model = tmp_path / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", "--experts", "--head-dim", "32", model)
    spec = yaml.safe_load((ROOT / "examples" / "tiny-experts.yaml").read_text())
    spec["model"]["path"] = str(model)
    for section, values in changes.items():
        spec[section] |= values
    with Fleet(tmp_path / "data", *options) as fleet:
        run = fleet.succeed(fleet.submit(spec), LONGEST_S)
        found = audit(fleet, run)
        slots = spec["algorithm"]["prompts_per_step"] * spec["algorithm"]["group_size"]
        assert len(found.trained) == spec["steps"] * slots and found.rewinds == 0
        assert all(
            item.log_prob_compared_tokens and item.log_prob_mismatch_mean < 1e-3 for item in found.live
        )
        before, *_, after = run.evaluations
        print(json.dumps({"case": name, "scores": [(each.step, each.score) for each in run.evaluations]}))
        assert after.step == spec["steps"] and after.score > before.score
