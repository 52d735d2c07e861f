"""What specs of a contained fleet may hold."""

import re
from pathlib import Path

import pytest
import yaml
from access_parts import people_of
from headrace_coordinator.access.trust import BadTrust, Trust, read_trust

CODE_OR_REACH = {
    "reward.scorers[0].name": {"reward": {"scorers": [{"name": "/home/ann/mine.py:score"}]}},
    "reward.stages.score[0].name": {"reward": {"stages": {"score": [{"name": "mine:score"}]}}},
    "data.source": {"data": {"source": "package.module:prompts"}},
    "data.options.path": {"data": {"source": "jsonl", "options": {"path": "/etc/passwd"}}},
    "data.exclude[0]": {"data": {"exclude": ["~/rows.jsonl"]}},
    "agent.command[0]": {"agent": {"command": ["bash", "-c", "curl x"]}},
    "agent.python": {"agent": {"python": "python3"}},
    "environment.options.mcp[0].command[0]": {"environment": {"options": {"mcp": [{"command": ["server"]}]}}},
    "environment.tasks[0]": {"environment": {"tasks": ["mine:Task-v0"]}},
    "environment.env[0]": {"environment": {"env": ["AWS_SECRET_ACCESS_KEY"]}},
    "reward.scorers[0].options.base_url": {
        "reward": {"scorers": [{"name": "judge", "options": {"base_url": "http://169.254.169.254/"}}]}
    },
    "reward.scorers[0].options.api_key_file": {
        "reward": {"scorers": [{"name": "judge", "options": {"api_key_file": "/run/key"}}]}
    },
    "reward.scorers[0].options.api_key": {
        "reward": {"scorers": [{"name": "judge", "options": {"api_key": "env:KEY"}}]}
    },
    "reward.scorers[0].options.sandbox": {
        "reward": {"scorers": [{"name": "code", "options": {"sandbox": "best_effort"}}]}
    },
    "tracking.trackers[0].options.tracking_uri": {
        "tracking": {"trackers": [{"name": "mlflow", "options": {"tracking_uri": "https://x.example"}}]}
    },
    "rollout.engine_options.trust_remote_code": {"rollout": {"engine_options": {"trust_remote_code": True}}},
    "model.trust_remote_code": {"model": {"path": "a/b", "trust_remote_code": "0" * 40}},
    "model.path": {"model": {"path": "/home/ann/model"}},
    "trainer.reference.path": {"trainer": {"reference": {"path": "/home/ann/model"}}},
    "from_checkpoint.run": {"from_checkpoint": {"run": "s3://bucket/run"}},
    "environment.options.network.allow[0]": {
        "environment": {"options": {"network": {"allow": ["x.example"]}}}
    },
    "data.options.folder": {"data": {"source": "jsonl", "options": {"folder": "data/../../ann/rows"}}},
    "rollout.engine_options.worker_cls": {"rollout": {"engine_options": {"worker_cls": "ann.Worker"}}},
    "store.url": {"store": {"url": "s3://bucket/runs"}},
}


@pytest.mark.parametrize("key", CODE_OR_REACH)
def test_code_and_reach_are_refused_by_their_key_and_allowed_by_the_list(key):
    spec = CODE_OR_REACH[key]
    assert list(Trust().problems(spec)) == []
    (found,) = list(Trust("contained").problems(spec))[:1]
    assert found.key == key and "contained" in found.problem and "allow:" in found.fix
    plain = re.sub(r"\[\d+\]", "", key)
    assert key not in [each.key for each in Trust("contained", {plain: ["*"]}).problems(spec)]
    assert key in [each.key for each in Trust("contained", {"name": ["*"]}).problems(spec)]


def test_a_name_of_something_where_the_fleet_was_started_is_a_path(tmp_path, monkeypatch):
    """And so it is compared with the list: whole, and with its links followed."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for path in ("secrets/rows.jsonl", "secrets"):
        spec = {"data": {"source": "jsonl", "options": {"path": path}}}
        assert [each.key for each in Trust("contained").problems(spec)] == ["data.options.path"]
        assert list(Trust("contained", {"data.options.path": [f"{tmp_path}/*"]}).problems(spec)) == []
    assert list(Trust("contained").problems({"model": {"path": "secrets/of-a-hub"}})) == []


def test_what_is_neither_passes():
    spec = {
        "name": "a/b:c",
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"source": "copy_digits", "prompt": {"template": "See https://x /etc {question}"}},
        "reward": {"scorers": [{"name": "last_number"}, {"name": "code", "options": {"sandbox": "strict"}}]},
        "placement": {"rollout": ["host/cpu:0"]},
        "rollout": {"engine_options": {"trust_remote_code": False}},
        "sampling": {"stop": ["env:", "/"]},
    }
    assert list(Trust("contained").problems(spec)) == []


def test_paths_of_the_fleet_s_models_and_allowed_folders(tmp_path):
    models, shared, home = (tmp_path / name for name in ("models", "shared", "home"))
    for folder in (models, shared, home):
        folder.mkdir()
    (shared / "out").symlink_to(home)
    trust = Trust("contained", {"*": [f"{shared}/*"]})

    def keys(path) -> list[str]:
        return [each.key for each in trust.problems({"model": {"path": str(path)}}, (models,))]

    assert keys(models / "tiny") == keys(shared / "mine") == []
    for path in (
        home / "m",
        f"{shared}/../home/m",
        shared / "out" / "m",
        f"{models}/../home",
        f"{models}/x.py:y",
    ):
        assert keys(path) == ["model.path"], path


def test_the_shipped_examples_need_no_more_than_their_paths():
    """What users begin with runs on a contained fleet, once its models and data are allowed."""
    examples = Path(__file__).resolve().parents[3] / "examples"
    found = yaml.safe_load((examples / "tiny.yaml").read_text())
    problems = list(Trust("contained", {"model.path": ["*"], "data.options.path": ["*"]}).problems(found))
    assert problems == []


async def test_a_contained_fleet_refuses_its_users_and_not_its_admin(served, spec_json):
    served.coordinator.submissions._trust = Trust("contained")
    spec = spec_json | {"data": {"source": "nowhere.module:prompts", "heldout": 1}}
    async with people_of(served) as people:
        refused = await people["ann"].post("/v1/runs?dry_run", json=spec)
        assert refused.status_code == 422
        assert refused.json()["problems"][0]["key"] == "data.source"
        assert "contained" in refused.text
        assert "contained" not in (await people["admin"].post("/v1/runs?dry_run", json=spec)).text
        assert (await people["ann"].post("/v1/runs", json=spec_json)).status_code == 201
        suite = {"suite": {"name": "/nowhere/mine.py:suite"}, "model": {"path": "m"}}
        assert "contained" in (await people["ann"].post("/v1/evaluations?dry_run", json=suite)).text


@pytest.mark.parametrize(
    ("level", "text", "told"),
    [
        ("closed", None, "no level"),
        ("open", "allow: {}\n", "allows already"),
        ("contained", "alow: {}\n", "alow"),
        ("contained", "allow: {model.path: /x}\n", "allow"),
        ("contained", "allow: [\n", "cannot be read"),
    ],
)
def test_a_bad_list_is_told_by_its_key(tmp_path, level, text, told):
    path = None
    if text is not None:
        path = tmp_path / "allow.yaml"
        path.write_text(text)
    with pytest.raises(BadTrust, match=told):
        read_trust(level, path)
