"""Specs as the client reads them: overrides, and names of files relative to the spec."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from headrace.client import HeadraceError, load_spec


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=2e-5", {"optimizer": {"lr": 2e-5}}),
        ("a.b.c=[1, x]", {"a": {"b": {"c": [1, "x"]}}}),
        ("flag=true", {"flag": True}),
        ("name=run-7", {"name": "run-7"}),
        ("version=1.2.3", {"version": "1.2.3"}),
        ("nothing=", {"nothing": None}),
    ],
)
def test_override_values_are_yaml(override, expected):
    assert load_spec({}, [override]) == expected


@pytest.mark.parametrize("key", ["reward.scorers.1.weight", "reward.scorers[1].weight"])
def test_overrides_reach_into_lists(key):
    spec = {"reward": {"scorers": [{"weight": 1}, {"weight": 1}]}}
    assert load_spec(spec, [f"{key}=3"])["reward"]["scorers"][1] == {"weight": 3}
    assert spec["reward"]["scorers"][1] == {"weight": 1}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps", "is not key=value"),
        ("steps.x=1", "steps is a value (1), not a section"),
        ("list.7=1", "is a list of 2"),
        ("a=[1", "is not a YAML value"),
    ],
)
def test_bad_overrides_name_key_and_fix(override, sentence):
    with pytest.raises(HeadraceError) as caught:
        load_spec({"steps": 1, "list": [1, 2]}, [override])
    (problem,) = caught.value.problems
    assert sentence in problem.problem and problem.fix and caught.value.is_user_error


def test_paths_in_files_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(*_): return 1.0")
    (tmp_path / "models" / "m").mkdir(parents=True)
    file = tmp_path / "run.yaml"
    scorers = "{scorers: [{name: mine.py:score}, {name: exact}]}"
    file.write_text(f"model: {{path: models/m}}\nreward: {scorers}")
    spec = load_spec(file)
    assert spec["model"]["path"] == str(tmp_path / "models" / "m")
    assert [item["name"] for item in spec["reward"]["scorers"]] == [f"{tmp_path / 'mine.py'}:score", "exact"]
    (tmp_path / "sums.jsonl").write_text("")
    file.write_text(
        "data: {source: mixture, options: {parts: [{source: jsonl, options: {path: sums.jsonl}}]}}\n"
        "algorithm: {options: {critic_path: ./models/m}}\n"
        "environment: {roles: {b: {path: ~/nowhere}}}\npolicies: {c: {model: {path: ./models/m}}}"
        "\nrollout: {engine_options: {speculative: {method: draft, model: ./models/m}}}"
    )
    spec = load_spec(file, ["trainer.reference.path=models/m", "data.options.parts.0.options.form=trl"])
    (part,) = spec["data"]["options"]["parts"]
    assert part["options"] == {"path": str(tmp_path / "sums.jsonl"), "form": "trl"}
    assert spec["algorithm"]["options"]["critic_path"] == str(tmp_path / "models" / "m")
    assert spec["rollout"]["engine_options"]["speculative"]["model"] == str(tmp_path / "models" / "m")
    assert spec["trainer"]["reference"]["path"] == str(tmp_path / "models" / "m")
    assert spec["environment"]["roles"]["b"]["path"] == f"{Path.home()}/nowhere"
    assert spec["policies"]["c"]["model"]["path"] == str(tmp_path / "models" / "m")
    file.write_text(
        "environment: {tasks: ['mine.py:Game', tools, suite/0], options: {"
        "tools: [mine.py:score, {name: search, options: {path: mine.py}}], "
        "mcp: [{command: [python, -m, ./mine.py, mine.py]}]}}"
    )
    environment = load_spec(file)["environment"]
    own = f"{tmp_path / 'mine.py'}:Game"
    named = "{tasks: ['mine.py:Game', 'mine.py:Game@v', suite/0], instructions: {'mine.py:Game': play, suite/0: go}}"
    for text, keys in (
        ("environment: %s", ()),
        ("suite: {options: {environment: %s}}", ("suite", "options")),
    ):
        (tmp_path / "named.yaml").write_text(text % named)
        found = load_spec(tmp_path / "named.yaml")
        for key in (*keys, "environment"):
            found = found[key]
        assert found["tasks"] == [own, f"{own}@v", "suite/0"]
        assert found["instructions"] == {own: "play", "suite/0": "go"}
    assert environment["tasks"] == [f"{tmp_path / 'mine.py'}:Game", "tools", "suite/0"]
    assert environment["options"] == {
        "tools": [
            f"{tmp_path / 'mine.py'}:score",
            {"name": "search", "options": {"path": str(tmp_path / "mine.py")}},
        ],
        "mcp": [{"command": ["python", "-m", str(tmp_path / "mine.py"), "mine.py"]}],
    }
    (tmp_path / "mine.py").touch()
    file.write_text("agent: {python: 'mine.py:play', command: [python, ./mine.py, --fast], task: ./mine.py}")
    agent = {
        "python": f"{tmp_path / 'mine.py'}:play",
        "command": ["python", str(tmp_path / "mine.py"), "--fast"],
        "task": str(tmp_path / "mine.py"),
    }
    assert load_spec(file)["agent"] == agent
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    assert load_spec({"model": {"path": "$MODELS/m"}})["model"]["path"] == str(tmp_path / "models" / "m")
    assert load_spec({}, ["model.path=models/m"])["model"]["path"] == str(tmp_path / "models" / "m")
    file.write_text("model: {path: HuggingFaceTB/SmolLM2-135M-Instruct}")
    assert load_spec(file)["model"]["path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    "where", ["data.options", "evaluation.data.other.options", "suite.options", "suite.options.options"]
)
@pytest.mark.parametrize("key", ["path", "dataset", "parts.0.options.path", "parts.0.options.dataset"])
def test_every_file_of_data_is_relative_to_the_spec(tmp_path, where, key):
    (tmp_path / "my rows.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to("my rows.jsonl")
    (tmp_path / "run.yaml").write_text("data: {options: {parts: [{options: {}}]}}\n")
    sections = f"{where}.{key}".split(".parts.0.")
    names = ["./my rows.jsonl", "./link.jsonl", "$HERE/link.jsonl", "~/link.jsonl"]
    for name in [*names, *(["my rows.jsonl", "link.jsonl"] if key.endswith("path") else [])]:
        given = {sections[0]: name} if len(sections) == 1 else {f"{sections[0]}.parts": [{}]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HERE", str(tmp_path))
            patch.setenv("HOME", str(tmp_path))
            found = load_spec(tmp_path / "run.yaml", {**given, f"{where}.{key}": name})
        for part in f"{where}.{key}".split("."):
            found = found[int(part) if part.isdigit() else part]
        assert found == str(tmp_path / Path(name).name), "a link stays one"


def test_what_a_link_names_is_executed_by_its_own_name(tmp_path):
    """Through its link a virtual environment's Python is another, without that environment's packages."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    command, mine = ["./venv/python", "mine.py"], str(tmp_path / "venv" / "python")
    (tmp_path / "run.yaml").write_text("steps: 1\n")
    overrides = {
        "agent": {"command": command},
        "environment": {"options": {"mcp": {"s": {"command": command}}}},
    }
    found = load_spec(tmp_path / "run.yaml", overrides)
    assert found["agent"]["command"][0] == found["environment"]["options"]["mcp"]["s"]["command"][0] == mine


@pytest.mark.parametrize(
    "key",
    [
        "reward.scorers.0.options.reward_model.path",
        *("policies.helper.model.path", "environment.roles.judge.path", "algorithm.options.critic_path"),
    ],
)
def test_every_key_that_names_a_file_is_relative_to_the_spec(tmp_path, key):
    (tmp_path / "here").touch()
    (tmp_path / "run.yaml").write_text("reward: {scorers: [{name: judge, options: {reward_model: {}}}]}\n")
    found = load_spec(tmp_path / "run.yaml", {key: "here"})
    for part in key.split("."):
        found = found[int(part) if part.isdigit() else part]
    assert found == str(tmp_path / "here")


@pytest.mark.parametrize("name", ["key", "./key", "~/key", "$HERE/key"])
@pytest.mark.parametrize("before", ["file:", "Bearer file:"])
def test_a_secret_in_a_file_is_relative_to_the_spec_wherever_it_stands(tmp_path, monkeypatch, name, before):
    (tmp_path / "key").touch()
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    given = [f"environment.options={{mcp: [{{env: {{A: '{before}{name}', B: 'env:KEY', C: 'file:///a'}}}}]}}"]
    (tmp_path / "run.yaml").write_text("steps: 1\n")
    found = load_spec(tmp_path / "run.yaml", given)["environment"]["options"]["mcp"][0]["env"]
    assert found == {"A": f"{before}{tmp_path / 'key'}", "B": "env:KEY", "C": "file:///a"}


def test_a_dictionary_that_json_lacks_is_refused():
    for value in (float("nan"), {1, 2}, 3j):
        with pytest.raises(HeadraceError, match="the spec: cannot be written as JSON"):
            load_spec({"steps": value})
