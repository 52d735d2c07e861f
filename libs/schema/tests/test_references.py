"""Secrets in specs are references: which keys hold one, what is refused, and what a reference stands for."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from headrace_schema import references
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import explain_value
from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import read_yaml

ROOT = Path(__file__).parents[3]
SECRET = "sk-canary-51e0"
SCORER = {"name": "judge", "options": {}}
RUN = {
    "model": {"path": "models/tiny"},
    "data": {"source": "jsonl", "options": {"path": "rows.jsonl"}},
    "reward": {"scorers": [SCORER], "evaluation": [SCORER], "stages": {"late": [SCORER]}},
    "evaluation": {"data": {"other": {"source": "jsonl", "options": {}}}},
    "tracking": {"trackers": [{"name": "mlflow", "options": {}}]},
    "rollout": {"engine_options": {"engine_args": {}}},
    "trainer": {"backend_options": {}},
    "algorithm": {"options": {}},
}
AGENT = {
    "workflow": "agentic",
    "model": {"path": "models/tiny"},
    "data": {"source": "jsonl", "options": {}},
    "agent": {"backend": "verifiers", "task": "house", "options": {}},
}
TOOLS = {
    "workflow": "agentic",
    "model": {"path": "models/tiny"},
    "data": {"source": "jsonl", "options": {}},
    "environment": {
        "tasks": ["tools"],
        "options": {"mcp": [{"command": ["serve"], "env": {}, "headers": {}}]},
        "variants": {"hard": {}},
    },
}
EVALUATION = {
    "model": {"path": "models/tiny"},
    "suite": {"name": "items", "options": {"environment": {"options": {}}}},
    "reward": {"scorers": [SCORER]},
    "rollout": {"engine_options": {}},
}
PLACES = [
    *((RunSpec, RUN, key) for key in ("reward.scorers[0].options", "reward.evaluation[0].options")),
    *((RunSpec, RUN, key) for key in ("reward.stages.late[0].options", "data.options", "algorithm.options")),
    *((RunSpec, RUN, key) for key in ("evaluation.data.other.options", "tracking.trackers[0].options")),
    *((RunSpec, RUN, key) for key in ("rollout.engine_options.engine_args", "trainer.backend_options")),
    (RunSpec, AGENT, "agent.options"),
    *((RunSpec, TOOLS, f"environment.options{key}") for key in ("", ".mcp[0].env", ".mcp[0].headers")),
    (RunSpec, TOOLS, "environment.variants.hard"),
    *((EvaluationSpec, EVALUATION, key) for key in ("suite.options", "suite.options.environment.options")),
    *((EvaluationSpec, EVALUATION, key) for key in ("reward.scorers[0].options", "rollout.engine_options")),
]
HOLDS = [
    *(
        "api_key",
        "apiKey",
        "API_KEY",
        "api-key",
        "x-api-key",
        "OPENAI_API_KEY",
        "APIKEY",
        "api_keys",
        "api_key_2",
    ),
    *(
        "api_key_openai",
        "openai_api_key_value",
        "token",
        "hf_token",
        "HFToken",
        "GITHUB_TOKEN",
        "accessToken",
    ),
    *(
        "auth_token",
        "authtoken",
        "session_token",
        "bot_token",
        "token_2",
        "access_tokens",
        "password",
        "db_password",
    ),
    *(
        "PGPASSWORD",
        "passwd",
        "pwd",
        "password_db",
        "secret",
        "client_secret",
        "client_secret_value",
        "SECRETS",
    ),
    *(
        "AWS_SECRET_ACCESS_KEY",
        "secret_key",
        "private_key",
        "signing_key",
        "Authorization",
        "proxy-authorization",
    ),
    *(
        "Ocp-Apim-Subscription-Key",
        "credentials",
        "passphrase",
        "jwt",
        "bearer",
        "SLACK_WEBHOOK_URL",
        "webhook",
    ),
]
HOLDS_NONE = [
    *("max_tokens", "max_new_tokens", "tokens", "stop_tokens", "token_level", "tokenizer", "tokenizer_mode"),
    *(
        "stop_token_ids",
        "eos_token",
        "pad_token",
        "image_token",
        "token_type",
        "per_token",
        "think_token",
        "key",
    ),
    *("keys", "answer_key", "question_key", "api_key_env", "api_key_file", "API_KEY_VAR", "password_file"),
    *(
        "password_length",
        "secret_word",
        "secret_name",
        "secrets_dir",
        "author",
        "authority",
        "keyboard",
        "monkey",
    ),
    *(
        "loss_aggregation",
        "signature",
        "level",
        "passed",
        "pass_reward",
        "token_count",
        "secretary",
        "cookiecutter",
    ),
]


def with_value(spec, key, value):
    """A copy of a spec with a value at a key such as a.b[0].c, without the problems of other keys."""
    made = json.loads(json.dumps(spec))
    *parts, last = key.replace("[", ".").replace("]", "").split(".")
    owner = made
    for part in parts:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    owner[last] = value
    return made


def problems(model, spec):
    return {each.key: each for each in explain_value(model, spec)}


@pytest.mark.parametrize(("model", "spec", "place"), PLACES, ids=[str(place) for _, _, place in PLACES])
@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("api_key", SECRET, "api_key"),
        ("Authorization", f"Bearer {SECRET}", "Authorization"),
        ("nested", [{"deep": {"password": SECRET}}], "nested[0].deep.password"),
        ("credentials", {"user": [SECRET]}, "credentials.user[0]"),
        ("headers", {"X-Auth": SECRET}, "headers.X-Auth"),
        ("address", f"https://me:{SECRET}@host/x", "address"),
        ("address", f"https://{SECRET}@host/x", "address"),
        ("address", f"https://host/x?a=1&access_token={SECRET}", "address"),
        ("args", ["run", "--token", SECRET], "args[2]"),
        ("args", [f"--api-key={SECRET}"], "args[0]"),
        ("args", ["run", "--token", "env:TOKEN"], "args[2]"),
        ("command", ["run", "env:TOKEN"], "command[1]"),
        ("token", "env:MY-KEY", "token"),
        ("token", "env:HEADRACE_TOKEN", "token"),
        ("token", "$TOKEN", "token"),
        ("token", "file:not/there", "token"),
        ("token", "file:///etc/token", "token"),
    ],
)
def test_a_secret_is_refused_at_every_place_by_its_key_with_the_fix(model, spec, place, name, value, key):
    found = problems(model, with_value(spec, f"{place}.{name}", value))
    assert list(found) == [f"{place}.{key}"]
    told = found[f"{place}.{key}"]
    assert "env" in told.fix or "file:PATH" in told.fix or "another variable" in told.fix
    assert SECRET not in f"{told.problem} {told.fix}"


@pytest.mark.parametrize(("model", "spec", "place"), PLACES, ids=[str(place) for _, _, place in PLACES])
@pytest.mark.parametrize("value", ["env:KEY", "file:/run/secrets/key", "Bearer env:KEY", "EMPTY", "", None])
def test_references_and_placeholders_are_taken_at_every_place(model, spec, place, value):
    made = with_value(spec, f"{place}.api_key", value)
    assert not [key for key in problems(model, made) if key.startswith(place) and key.endswith("api_key")]
    assert not references.literals(made)


@pytest.mark.parametrize("key", HOLDS)
def test_keys_that_hold_a_secret(key):
    assert references.holds_secret(key)
    assert [each.key for each in references.literals({"a": {key: SECRET}})] == [f"a.{key}"]


@pytest.mark.parametrize("key", HOLDS_NONE)
def test_keys_that_hold_none(key):
    assert not references.holds_secret(key)
    assert not references.literals({"a": {key: "text", "b": [{key: "text"}]}})


def test_variables_and_headers_hold_more_and_are_told_in_every_form():
    for name in ("SERPER_KEY", "DB_PASS", "X-Auth", "PIN"):
        assert references.literals({"env": {name: "x"}}) and not references.literals({"options": {name: "x"}})
    assert not references.literals({"env": {"LANG": "C", "KEYS": "a"}, "headers": {"Accept": "*/*"}})
    given = {"env": ["HF_TOKEN", f"HF_TOKEN={SECRET}"], "headers": [f"Authorization: Bearer {SECRET}"]}
    assert [each.key for each in references.literals(given)] == ["env[1]", "headers[0]"]
    assert not references.literals({"env": {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/google.json"}})
    assert references.literals({"env": {"DATABASE": "env:NO-NAME"}})


def test_addresses_and_commands_without_a_secret_are_taken():
    for text in (
        "https://host/x?max_tokens=5",
        "git@host:a/b",
        "ssh://git@host/x",
        "see https://a:b@c in the text",
    ):
        assert not references.literals({"url": text}), text
    command = ["serve", "--token-file", "/run/token", "--max-tokens", "5", "--token"]
    assert not references.literals({"command": command})
    assert references.literals({"command": ["sh", "-c", "curl https://me:x@host"]})


def test_no_example_holds_one():
    files = [file for file in (ROOT / "examples").rglob("*.yaml") if "compose" not in file.name]
    assert len(files) > 40
    for file in files:
        for document in file.read_text().split("\n---\n"):
            assert not references.literals(read_yaml(document)), file


def test_a_reference_is_read_where_it_stands_and_the_spec_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setenv("KEY", f" {SECRET}\n")
    (tmp_path / "key").write_text("of the file\n")
    given = {
        "api_key": "env:KEY",
        "env": {"A": "env:KEY", "B": "plain"},
        "list": [f"file:{tmp_path}/key", 1],
        "headers": {"Authorization": "Bearer env:KEY"},
        "command": ["run", "env:KEY"],
    }
    before = copy.deepcopy(given)
    assert references.resolved(given) == {
        "api_key": SECRET,
        "env": {"A": SECRET, "B": "plain"},
        "list": ["of the file", 1],
        "headers": {"Authorization": f"Bearer {SECRET}"},
        "command": ["run", "env:KEY"],
    }
    assert given == before and references.variables(given) == ["KEY", "KEY", "KEY"]
    assert references.resolved({"a": 1}) == {"a": 1}
    said = references.redacted({"error": [f"401 for {SECRET}, of the file"]})
    assert said == {"error": [f"401 for env:KEY, file:{tmp_path}/key"]}


def test_a_secret_that_is_not_there_is_told_by_key(monkeypatch, tmp_path):
    monkeypatch.delenv("KEY", raising=False)
    (tmp_path / "data").mkdir()
    for name, content in (("data/token", "x"), ("empty", ""), ("long", "x" * 70_000), ("bytes", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "link").symlink_to("data/token")
    monkeypatch.setattr(references, "_closed", [])
    references.keep_closed([tmp_path / "data"])
    for reference, words in {
        "env:KEY": "has no variable KEY",
        "env:HEADRACE_TOKEN": "the services' own",
        f"file:{tmp_path}/none": "cannot be read (No such file",
        f"file:{tmp_path}": "cannot be read (Is a directory",
        f"file:{tmp_path}/empty": "is no file with a secret",
        f"file:{tmp_path}/long": "is no file with a secret",
        f"file:{tmp_path}/bytes": "it is no text",
        f"file:{tmp_path}/data/token": "a file of the fleet's own",
        f"file:{tmp_path}/link": "a file of the fleet's own",
        f"file:{tmp_path}/x/../data/token": "",
        "file:/proc/self/environ": "is no file with a secret",
        "file:/dev/zero": "is no file with a secret",
    }.items():
        with pytest.raises(references.Unread) as raised:
            references.resolved({"mcp": [{"env": {"A": reference}}]})
        assert raised.value.key == "mcp[0].env.A" and words in raised.value.reason, raised.value
