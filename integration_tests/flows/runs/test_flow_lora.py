"""A run that trains adapters: it learns, loses its trainer, goes on to the same bits, and is evaluated and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.ledger import audit
from harness.waiting import wait_for
from headrace.client import HeadraceError

STEPS = 16
LORA = {"rank": 8, "alpha": 16}
SETTINGS = {
    "steps": STEPS,
    "deterministic": True,
    "export": True,
    "sampling": {"temperature": 0.1},  # the frozen head is random and small: its logits are
    "trainer": {"lora": LORA, "warmup": {"steps": 0}},
    "optimizer": {"lr": 3.0e-3},
    "checkpoint": {"interval_steps": 1, "keep": 2},
}


def test_adapters_learn_over_a_killed_trainer_to_the_same_bits(fleet, spec_of):
    calm = fleet.succeed(fleet.submit(spec_of(name="calm", **SETTINGS)))
    rewards = [step.reward_mean for step in fleet.client.metrics(calm.id)]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.4, rewards
    run = fleet.submit(spec_of(name="struck", **SETTINGS))
    fleet.reach(run, 3)
    fleet.replaced("trainer-0", fleet.kill("trainer-0"))
    fleet.reach(run, 6)
    fleet.replaced("rollout-0", fleet.kill("rollout-0"))
    found = audit(fleet, run := fleet.succeed(run))
    assert found.rewinds >= 1 and len(found.live) == STEPS
    first, second = (fleet.client.checkpoints(each.id)[0] for each in (calm, run))
    assert first.step == second.step == STEPS and first.version.digest == second.version.digest
    assert all(item.log_prob_mismatch_mean < 1e-3 for item in found.live), "engines have what is trained"

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
    assert judged.state == "SUCCEEDED" and judged.weights_digest == second.version.digest

    exported = Path(run.export_path)
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16) and (exported / "model.safetensors").is_file()


def test_adapters_alone_learn_what_merged_weights_do_with_fewer_bytes(fleet, spec_of):
    """Both runs share the fleet. Merged at the rollout or at the trainer, the weights are the same to the bit."""
    ways = {"transports": ["grpc"]}
    runs = [
        fleet.submit(spec_of(name=lora, **SETTINGS | {"steps": 6}, weights=ways | {"lora": lora}))
        for lora in ("adapter", "merged")
    ]
    alone, merged = ([*fleet.client.metrics(fleet.succeed(run).id)] for run in runs)
    assert [step.reward_mean for step in alone] == [step.reward_mean for step in merged]
    assert [step.figures.get("loss") for step in alone] == [step.figures.get("loss") for step in merged]
    # A step in which all answers of each group score alike changes nothing, and what is held is not sent.
    moved = [sum(step.figures["weights_bytes"] for step in steps[1:]) for steps in (alone, merged)]
    assert 0 < moved[0] < moved[1] / 2, moved


def test_a_wrong_target_or_combination_is_refused(fleet, spec_of):
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec_of(trainer={"lora": LORA, "helpers": 1}, rollout={"instances": 2}))
    assert [each.key for each in refused.value.problems] == ["trainer.helpers"]
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec_of(weights={"lora": "adapter"}))
    assert [each.key for each in refused.value.problems] == ["weights.lora"]
    run = fleet.submit(spec_of(trainer={"lora": {"targets": ["q_porj"]}}))
    failed = fleet.state(run, "FAILED")
    assert "trainer.lora.targets" in failed.reason and "did you mean q_proj?" in failed.reason


@pytest.mark.nightly  # The quick twin is test_trainer_export.py.
@pytest.mark.parametrize(
    "settings",
    [
        *({"trainer": {"lora": {**LORA, "quantization": form}}} for form in ("nf4", "int8", "fp8")),
        *({"optimizer": {"name": name}, "trainer": {}} for name in ("muon", "adamw_8bit")),
    ],
    ids=["nf4 base", "int8 base", "fp8 base", "muon", "adamw in 8 bits"],
)
def test_a_run_that_keeps_fewer_bytes_loses_its_trainer_and_is_exported(fleet, spec_of, settings):
    run = fleet.submit(spec_of(**{**SETTINGS, "steps": 6, "deterministic": False, **settings}))
    fleet.reach(run, 2)
    fleet.replaced("trainer-0", fleet.kill("trainer-0"))
    found = audit(fleet, run := fleet.succeed(run))
    assert found.rewinds >= 1 and len(found.live) == 6
    assert all(item.log_prob_mismatch_mean < 1e-3 for item in found.live)
    assert (Path(run.export_path) / "model.safetensors").is_file()
