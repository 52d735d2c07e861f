"""Whole runs of a tiny mixture of experts: it learns with divided experts, replayed routes and a balance loss."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, run_python

LONGEST_S = 900.0
HERE = "ENGINE" if os.environ.get("ENGINE") else "MEGATRON" if os.environ.get("MEGATRON") else ""
"""Whose environment the tests are run for, which `ci.engines` and `ci.plan` say."""


@dataclass(frozen=True)
class Case:
    """What differs from the example: the fleet's options, and sections of the spec."""

    environment: str
    options: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)


CASES = {
    "fsdp": Case(""),
    "megatron": Case("MEGATRON", ("--backend", "megatron"), {"trainer": {"backend": "megatron"}}),
    "vllm": Case(
        "ENGINE",
        ("--engine", "vllm"),
        {
            "rollout": {"engine": "vllm", "engine_options": {"enforce_eager": True, "kv_cache_gib": 0.25}},
            # vLLM tells routes with its second model runner alone, which needs Triton.
            "algorithm": {"options": {"loss_aggregation": "token-mean", "balance_loss_coef": 0.001}},
        },
    ),
}


@dataclass(frozen=True)
class Learned:
    """What a run came to: (step, held-out score) of its evaluations, and every step's figures."""

    scores: list[tuple[int, float]]
    figures: list[dict[str, float]]


def learn(name: str, folder: Path, bound: float = 1e-3, dtype: str = "float32", **sections: Any) -> Learned:
    """Runs the example as a case has it. `bound` is of the mismatch between engine and trainer, in every step."""
    case = CASES[name]
    model = folder / "model"
    run_python("-m", "headrace_modelkit.presets.tiny", "--experts", "--head-dim", "32", model)
    spec = yaml.safe_load((ROOT / "examples" / "tiny-experts.yaml").read_text()) | sections
    spec["model"] |= {"path": str(model), "dtype": dtype}
    for section, values in case.changes.items():
        spec[section] |= values
    with Fleet(folder / "data", "--trainer", "2", *case.options) as fleet:
        run = fleet.succeed(fleet.submit(spec), LONGEST_S)
        scores = [(each.step, each.score) for each in run.evaluations]
        print(json.dumps({"case": name, "scores": scores}))
        found = audit(fleet, run)
        slots = spec["algorithm"]["prompts_per_step"] * spec["algorithm"]["group_size"]
        assert len(found.trained) == spec["steps"] * slots and found.rewinds == 0
        # What the engine says of its tokens, under each version that it took, is what the trainer computes of them.
        assert all(
            item.log_prob_compared_tokens and item.log_prob_mismatch_mean < bound for item in found.live
        )
        return Learned(scores, [dict(step.figures) for step in fleet.client.metrics(run.id)])


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 180)
@pytest.mark.parametrize("name", CASES)
def test_the_tiny_mixture_of_experts_learns(name, tmp_path):
    if CASES[name].environment not in ("", HERE) or (HERE == "ENGINE" and os.environ["ENGINE"] != name):
        pytest.skip("another environment's")
    (_, before), *_, (step, after) = learn(name, tmp_path).scores
    assert step == 60 and after > before


@pytest.mark.nightly
@pytest.mark.skipif(os.environ.get("ENGINE") != "vllm", reason="the nightly part vllm runs this")
def test_vllm_takes_every_version_of_the_mixture_of_experts(tmp_path):
    """A few steps of the nightly run: vLLM packs experts for the CPU's kernels at its first load alone."""
    found = learn("vllm", tmp_path, steps=4, evaluation={"every": 0}).figures
    assert len(found) == 4 and all(step["busiest_expert"] > 1.0 for step in found)


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 180)
@pytest.mark.skipif(bool(HERE), reason="another environment's")
def test_replayed_routes_bring_trainer_and_engine_together_in_bf16(tmp_path):
    """Both round to bf16, each in its own order of products, and now and then a router makes another expert of it."""
    found = learn("fsdp", tmp_path, bound=0.1, dtype="bfloat16", steps=12).figures
    with_replay, without, changed = (
        [step[figure] for step in found]
        for figure in ("log_prob_mismatch_mean", "log_prob_mismatch_without_replay", "routes_changed")
    )
    print(json.dumps({"with": with_replay, "without": without, "changed": changed}))
    assert 0.0 < max(changed) < 0.1
    assert sum(with_replay) < sum(without)
