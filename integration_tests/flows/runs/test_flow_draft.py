"""A run whose policy learns with a head that drafts: it is published, used, evaluated beside, exported, and goes on
over a killed trainer to the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.ledger import audit
from harness.waiting import wait_for
from headrace_modelkit.presets.families import write_predicting
from safetensors.numpy import load_file

STEPS = 12
SETTINGS = {
    "steps": STEPS,
    "deterministic": True,
    "export": True,
    "algorithm": {"prompts_per_step": 6, "group_size": 4},
    "trainer": {"draft": {"lr": 3.0e-3, "unrolled": 2}, "warmup": {"steps": 0}},
    "optimizer": {"lr": 3.0e-3},
    "rollout": {"engine": "transformers", "max_concurrency": 8, "engine_options": {"speculative_tokens": 2}},
    "checkpoint": {"interval_steps": 1, "keep": 2},
}
WARM = {"steps": 20, "lr": 2.0e-3, "batch": 32}


def shares(fleet, run, name):
    return [step.figures[name] for step in fleet.client.metrics(run.id)]


def test_a_head_learns_beside_the_policy_and_drafts_for_it(fleet, spec_of):
    spec = spec_of(**SETTINGS | {"trainer": SETTINGS["trainer"] | {"warmup": WARM}})
    run = fleet.succeed(fleet.submit(spec))
    losses, steps = shares(fleet, run, "draft_loss"), [*fleet.client.metrics(run.id)]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.0, losses
    assert sum(step.figures.get("drafted_tokens", 0) for step in steps) > 0
    assert all(step.figures["log_prob_mismatch_bits"] == 0 for step in steps)
    exported = Path(run.export_path)
    config = json.loads((exported / "draft" / "config.json").read_text())
    head = load_file(exported / "draft" / "model.safetensors")
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"] and "midlayer.self_attn.q_proj.weight" in head
    )
    assert not any(name.startswith("draft.") for name in load_file(exported / "model.safetensors"))

    suite = {"name": "items", "options": {"source": "copy_digits", "options": {"digits": 3}, "heldout": 8}}
    made = fleet.client.evaluate(
        {
            "suite": suite,
            "checkpoint": {"run": run.id},
            "prompt": {"template": "{question}", "chat": False},
            "sampling": {"max_new_tokens": 4},
        }
    )
    judged = wait_for(
        lambda: now if (now := fleet.client.evaluation(made.id)).ended else None, "an evaluation"
    )
    last = fleet.client.checkpoints(run.id)[0]
    assert judged.state == "SUCCEEDED" and judged.weights_digest == last.version.digest


@pytest.mark.nightly  # quick: test_trainer_draft.py goes on where a checkpoint ended
def test_a_head_goes_on_over_a_killed_trainer_to_the_same_bits(fleet, spec_of):
    calm = fleet.succeed(fleet.submit(spec_of(name="calm", **SETTINGS)))
    run = fleet.submit(spec_of(name="struck", **SETTINGS))
    fleet.reach(run, 3)
    fleet.replaced("trainer-0", fleet.kill("trainer-0"))
    fleet.reach(run, 6)
    fleet.replaced("rollout-0", fleet.kill("rollout-0"))
    found = audit(fleet, run := fleet.succeed(run))
    assert found.rewinds >= 1 and len(found.live) == STEPS
    first, second = (fleet.client.checkpoints(each.id)[0] for each in (calm, run))
    assert first.step == second.step == STEPS and first.version.digest == second.version.digest


@pytest.mark.nightly  # quick: test_trainer_mtp.py, test_engine_learned_drafts.py
@pytest.mark.parametrize(
    ("family", "before"), [("deepseek_v3", "model.layers.2"), ("qwen3_next", "mtp.layers.0")]
)
def test_a_layer_of_the_checkpoint_learns_drafts_and_comes_back_among_the_others(
    family, before, fleet, spec_of, tmp_path
):
    """Experts of it are published one by one, as the checkpoint has them."""
    layer = write_predicting(tmp_path / "model", family)
    own = {
        "deterministic": False,
        "steps": 4,
        "trainer": {"draft": {"form": "mtp", "lr": 1e-2, "unrolled": 2}, "warmup": WARM},
    }
    run = fleet.succeed(fleet.submit(spec_of(model__path=str(tmp_path / "model"), **SETTINGS | own)))
    steps = [*fleet.client.metrics(run.id)]
    assert any(step.figures.get("draft_loss", 0.0) > 0 for step in steps), "no step has learned from answers"
    assert sum(step.figures.get("drafted_tokens", 0) for step in steps) > 0
    assert all(step.log_prob_mismatch_mean < 1e-3 for step in fleet.client.certificates(run.id))
    exported, given = (
        load_file(Path(each) / "model.safetensors") for each in (run.export_path, tmp_path / "model")
    )
    assert exported.keys() == given.keys() and layer.keys() <= exported.keys()
    assert not (Path(run.export_path) / "draft").exists()
    moved = f"{before}.mlp.experts.1.down_proj.weight"
    assert exported[moved].shape == given[moved].shape and (exported[moved] != given[moved]).any()
