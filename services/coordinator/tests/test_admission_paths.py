"""Paths of models in a spec: what is not there, holds no model, or is elsewhere for a service, is named by its key."""

import os

import pytest
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.local_rules import models
from headrace_schema.problems import sentence
from headrace_schema.spec import RunSpec
from submission_parts import submission_of

TALK = {"tasks": ["exchange"], "roles": {"replier": {"path": "./replier"}}}


def problems(changes: dict) -> dict[str, str]:
    spec = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits", "heldout": 10},
        "reward": {"scorers": [{"name": "exact"}]},
        **changes,
    }
    found = models(submission_of(RunSpec.model_validate(spec), FleetView({}, {}, [])))
    return {item.key: sentence(item) for item in found}


def test_every_model_of_a_spec_is_looked_for(tmp_path):
    found = problems(
        {
            "workflow": "agentic",
            "environment": TALK,
            "trainer": {"reference": {"path": str(tmp_path / "none")}},
            "algorithm": {"name": "ppo", "options": {"critic": "model", "critic_path": "~/critic"}},
        }
    )
    replier = "environment.roles.replier.path"
    assert found.keys() == {"trainer.reference.path", "algorithm.options.critic_path", replier}
    assert "does not exist" in found["trainer.reference.path"] and "does not exist" in found[replier]
    assert "another directory for each user" in found["algorithm.options.critic_path"]


def model_problem(path, **values) -> dict[str, str]:
    return problems({"model": {"path": str(path), **values}})


def test_a_model_directory_must_hold_a_model(tmp_path):
    model = tmp_path / "tiny-model"
    assert "does not exist; did you mean" not in model_problem(model)["model.path"]
    model.mkdir()
    assert "it has no config.json" in model_problem(model)["model.path"]
    (model / "config.json").write_text("{}")
    assert "it has no safetensors weights" in model_problem(model)["model.path"]
    (model / "model.safetensors").write_bytes(b"")
    assert model_problem(model) == {}
    assert f"did you mean {model}?" in model_problem(tmp_path / "tiny-modle")["model.path"]
    assert f"did you mean {model}?" in model_problem(tmp_path)["model.path"]
    assert "is a file" in model_problem(model / "config.json")["model.path"]
    assert f"the nearest that exists is {tmp_path}" in model_problem(tmp_path / "x" / "y")["model.path"]


def test_gguf_weights_are_named(tmp_path):
    (tmp_path / "weights-q4.gguf").write_bytes(b"")
    assert "set model.gguf_file: weights-q4.gguf" in model_problem(tmp_path)["model.gguf_file"]
    assert model_problem(tmp_path, gguf_file="weights-q4.gguf") == {}
    found = model_problem(tmp_path, gguf_file="weights-q8.gguf")["model.gguf_file"]
    assert "did you mean weights-q4.gguf?" in found


def test_paths_that_look_local_and_ids_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in model_problem("./models/x")["model.path"]
    for named in ("./models/tiny", ".headrace/models/tiny_vision"):
        made = model_problem(named)["model.path"]
        preset = f"python -m headrace_modelkit.presets.{named.rpartition('/')[2]}"
        assert f"make it: {preset} {named.removeprefix('./')}" in made
    assert "is another directory for each user" in model_problem("~/models/x")["model.path"]
    (tmp_path / "plain").mkdir()
    assert "it has no config.json" in model_problem("plain")["model.path"]
    for wrong in ("a b", "a/b/c", "a\0b", "x" * 5000):
        assert "model.path" in model_problem(wrong) or wrong == "x" * 5000, wrong


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_directory_is_named(tmp_path):
    (tmp_path / "m").mkdir(mode=0)
    assert "cannot be read" in model_problem(tmp_path / "m")["model.path"]


def test_a_robot_policy_comes_from_no_hub_and_is_no_language_model(tmp_path):
    robot = {"workflow": "embodied", "environment": {"tasks": ["Pendulum-v1"]}, "algorithm": {"name": "ppo"}}
    robot |= {"data": {}, "reward": {"scorers": [{"name": "episode"}]}}

    def found(path) -> str:
        return problems({**robot, "model": {"path": str(path)}}).get("model.path", "")

    for path in ("openvla/openvla-7b", "policies/openvla"):
        assert f"there is no directory {path}" in found(path) and "from no hub by an id" in found(path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "it has no policy.json" in found(tmp_path)
    (tmp_path / "policy.json").write_text("{}")
    assert not found(tmp_path)
