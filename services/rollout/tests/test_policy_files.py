"""Weights that are read from a checkpoint's directory."""

from __future__ import annotations

from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.weights import state_tensors
from headrace_rollout.runs.policy_files import read_policy
from headrace_schema.openings import RolloutConfig
from headrace_schema.sections.generating import ModelSection
from safetensors.torch import save_file


def test_each_policy_is_read_from_a_checkpoint_that_holds_several(tiny_directory, tmp_path):
    write_tiny(tmp_path / "other", seed=5)
    own, other = (
        dict(state_tensors(load_model(ModelSection(path=str(path), dtype="float32"))))
        for path in (tiny_directory, tmp_path / "other")
    )
    both = {**own, **{f"tutor/{name}": tensor for name, tensor in other.items()}}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({name: tensor.detach() for name, tensor in both.items()}, checkpoint / "weights.safetensors")
    config = RolloutConfig.model_validate({"model": {"path": str(tiny_directory), "dtype": "float32"}})
    manifest, body = read_policy(config, str(checkpoint), "")
    wanted, weights = read_policy(config, "", "")
    assert manifest.digest == wanted.digest and body == weights
    tutor, theirs = read_policy(config, str(checkpoint), "", "tutor")
    initial, begun = read_policy(
        RolloutConfig.model_validate({"model": {"path": str(tmp_path / "other"), "dtype": "float32"}}), "", ""
    )
    assert tutor.digest == initial.digest and theirs == begun
