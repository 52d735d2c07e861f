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
from headrace.client import HeadraceError

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


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 120)
@pytest.mark.skipif(ENGINE != "vllm", reason="vLLM's options; `make nightly` runs it")
def test_a_quantised_rollout_that_drafts_learns_with_what_it_is_off(tmp_path):
    """fp8 weights and n-gram drafts: the gradient is corrected by default, and the mismatch is in each step."""
    model = tmp_path / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", model, "--head-dim", "32")
    spec = yaml.safe_load((ROOT / "examples" / "tiny-vllm.yaml").read_text())
    spec["model"] |= {"path": str(model), "dtype": "bfloat16"}
    spec["steps"], spec["evaluation"]["every"] = 12, 0
    spec["rollout"]["engine_options"] |= {
        "quantization": "fp8",
        "speculative": {"method": "ngram", "tokens": 2},
    }
    with Fleet(tmp_path / "data", "--engine", "vllm") as fleet:
        exact = {**spec, "model": {**spec["model"], "dtype": "float32"}}
        with pytest.raises(HeadraceError) as refused:
            fleet.client.check(exact)
        assert [each.key for each in refused.value.problems] == ["rollout.engine_options.quantization"]
        run = fleet.succeed(fleet.submit(spec), LONGEST_S)
        found = audit(fleet, run)
        assert run.spec["algorithm"]["options"]["correction"] == "truncate"
        off = [item.log_prob_mismatch_mean for item in found.live]
        assert all(1e-4 < each < 0.3 for each in off), off
        before, *_, after = run.evaluations
        assert after.score > before.score


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 120)
@pytest.mark.skipif(ENGINE != "vllm", reason="vLLM's engines beside each other; `make nightly` runs it")
@pytest.mark.parametrize("one", [False, True], ids=["an engine each", "one for both"])
def test_two_policies_of_one_conversation_learn_from_vllm(tmp_path, one):
    """Two engines of one instance, each of which takes its own policy's weights and sleeps between its turns; or one
    with the adapters of both (rollout.enable_lora).
    """
    model = tmp_path / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", model, "--head-dim", "32")
    spec = yaml.safe_load((ROOT / "examples" / "agents" / "hint_policies.yaml").read_text())
    spec["model"]["path"] = str(model)
    spec["environment"] |= {"tasks": [f"{ROOT / 'examples' / 'agents' / 'hint.py'}:Hint"], "count": 8}
    spec["policies"]["guesser"]["optimizer"] = {"lr": 1e-9}  # only one of the two moves
    spec["rollout"] = yaml.safe_load((ROOT / "examples" / "tiny-vllm.yaml").read_text())["rollout"]
    spec["algorithm"] |= {"prompts_per_step": 4, "group_size": 4}
    if one:
        spec["rollout"]["enable_lora"] = True
        spec["trainer"] = {"lora": {"rank": 4}}
    spec |= {
        "steps": 3,
        "evaluation": {"every": 0},
        "data": {"heldout": 4},
        "placement": {"mode": "collocated"},
    }
    with Fleet(tmp_path / "data", "--engine", "vllm") as fleet:
        run = fleet.succeed(fleet.submit(spec), LONGEST_S)
        assert audit(fleet, run).trained
        for step in fleet.client.metrics(run.id):
            assert step.figures["policy/tokens"] > 0 and step.figures["guesser/tokens"] > 0
            # With the other's weights, or those of a version before, it would be more than this by far.
            assert all(
                step.figures[f"{each}/log_prob_mismatch_mean"] < 1e-3 for each in ("policy", "guesser")
            )
