"""What an embodied run exports can be a run's model.path again."""

from __future__ import annotations

from headrace_modelkit.weights import state_tensors
from headrace_robots.policies.directory import load_policy, policy_config, save_policy
from headrace_schema.openings import TrainerConfig
from headrace_trainer.workloads import run_kind

POLICY = {"kind": "mlp", "bounds": {"low": [-1.0], "high": [1.0]}, "state_size": 2, "hidden": [4]}


def test_an_exported_policy_has_the_trained_weights_and_its_tokenizer(tmp_path):
    save_policy(policy_config(POLICY).build(0), tmp_path / "begun")
    (tmp_path / "begun" / "tokenizer.json").write_text("{}")
    config = TrainerConfig.model_validate({"model": {"path": str(tmp_path / "begun"), "dtype": "float32"}})
    trained = dict(state_tensors(policy_config(POLICY).build(1)))
    run_kind(config).export(iter(trained.items()), tmp_path / "export")
    for name, tensor in state_tensors(load_policy(tmp_path / "export")):
        assert tensor.equal(trained[name]), name
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
