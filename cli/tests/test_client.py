"""The Python client against a scripted coordinator: what it sends, makes of answers, and survives."""

from __future__ import annotations

import doctest
import json
import sys
import threading
import time
from pathlib import Path

import headrace.client.errors
import headrace.client.specs
import headrace.client.transport
import pytest
from headrace.client import Client, HeadraceError, Run, load_spec
from headrace.client.client import CHECK_S, checking_s


@pytest.fixture
def client(coordinator):
    with Client(coordinator.url, "secret", patience_s=0) as made:
        yield made


@pytest.mark.parametrize("module", ["errors", "specs", "transport"])
def test_docstring_examples_hold(module):
    result = doctest.testmod(getattr(headrace.client, module))
    assert result.attempted and not result.failed


def test_submit_sends_spec_token_and_key(client, coordinator, scripted_run):
    scripted_run()
    run = client.submit({"name": "mine", "optimizer": {"lr": 1}}, {"optimizer.lr": 2}, idempotency_key="k-1")
    (got,) = coordinator.requests("POST /v1/runs")
    assert run.id == "r-1" and run.spec == {"name": "mine", "optimizer": {"lr": 2}} == got.body
    assert got.headers["authorization"] == "Bearer secret"
    assert got.headers["idempotency-key"] == "k-1"


def test_resources_are_lenient():
    run = Run.from_json({"id": "r", "policy": None, "counts": {"trained": 2, "brand_new": 1}, "brand_new": 5})
    assert (run.counts.trained, run.policy, run.raw["brand_new"]) == (2, None, 5)
    assert (run.counts.dropped, run.waiting_for, run.ended) == (0, [], False)


def test_figures_that_nobody_measured_are_none(client, coordinator):
    coordinator.routes["GET /v1/runs/r-1/metrics"] = (200, {"steps": [{"step": 1, "reward_mean": None}]})
    assert client.metrics("r-1")[0].reward_mean is None


def test_lists_follow_pages(client, coordinator):
    def page(got):
        if "page_token" not in got.query:
            return 200, {"runs": [{"id": "b"}], "next_page_token": "t"}
        assert got.query["page_token"] == ["t"]
        return 200, {"runs": [{"id": "a"}], "next_page_token": ""}

    coordinator.routes["GET /v1/runs"] = page
    assert [run.id for run in client.list()] == ["b", "a"]


def test_refusals_carry_reason_and_keys(client, coordinator):
    problem = {"key": "steps", "problem": "must be above 0", "fix": "the nearest valid value is 1"}
    coordinator.routes["POST /v1/runs"] = (422, {"reason": "INVALID", "message": "no", "problems": [problem]})
    with pytest.raises(HeadraceError) as caught:
        client.submit({"steps": 0})
    assert caught.value.reason == "INVALID" and caught.value.is_user_error
    assert [(p.key, p.fix) for p in caught.value.problems] == [("steps", "the nearest valid value is 1")]


def test_other_bodies_become_errors_too(client, coordinator):
    coordinator.routes["GET /v1/runs/r"] = (502, ["a proxy"])
    with pytest.raises(HeadraceError) as caught:
        client.get("r")
    assert caught.value.reason == "HTTP_502" and not caught.value.is_user_error


def test_unreachable_is_an_error_at_once_without_patience(free_port):
    client = Client(f"http://127.0.0.1:{free_port}", patience_s=0)
    with pytest.raises(HeadraceError, match=f"no coordinator answers at http://127.0.0.1:{free_port}"):
        client.list()
    assert client.healthy() is False


def test_broken_write_is_repeated_with_its_key(coordinator, scripted_run):
    run = scripted_run()
    keys = []

    def breaks_once(got):
        keys.append(got.headers["idempotency-key"])
        if len(keys) == 1:
            raise ConnectionAbortedError("the answer is lost")
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = breaks_once
    with Client(coordinator.url, patience_s=10) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(keys) == 2 and keys[0] == keys[1]


def test_a_call_that_is_not_possible_yet_is_repeated_with_its_key(coordinator, scripted_run):
    run, keys = scripted_run(), []

    def busy_once(got):
        keys.append(got.headers["idempotency-key"])
        if len(keys) == 1:
            return 503, {"reason": "UNAVAILABLE", "message": "its instances register"}, {"Retry-After": "0"}
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = busy_once
    with Client(coordinator.url, patience_s=0) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(keys) == 2 and keys[0] == keys[1]


@pytest.mark.parametrize("after", [{}, {"Retry-After": "3600"}], ids=["never", "too_late"])
def test_a_call_that_will_not_be_possible_soon_is_an_error_at_once(coordinator, after):
    coordinator.routes["POST /v1/runs"] = (
        503,
        {"reason": "UNAVAILABLE", "message": "the store is away"},
        after,
    )
    with Client(coordinator.url, patience_s=0) as client, pytest.raises(HeadraceError, match="store is away"):
        client.submit({"name": "once"})
    assert len(coordinator.requests("POST /v1/runs")) == 1


def test_a_coordinator_that_is_slow_is_not_called_absent(coordinator):
    coordinator.routes["POST /v1/runs"] = lambda got: time.sleep(0.6)
    with (
        Client(coordinator.url, timeout_s=0.2, patience_s=0) as client,
        pytest.raises(
            HeadraceError, match=r"does not answer POST /v1/runs/r:pause.*idempotency key"
        ) as caught,
    ):
        coordinator.routes["POST /v1/runs/r:pause"] = lambda got: time.sleep(0.6)
        client.pause("r")
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    while not (seen := coordinator.requests("POST /v1/runs/r:pause")):
        time.sleep(0.01)  # the server's thread may be behind
    (got,) = seen
    assert got.headers["idempotency-key"] in caught.value.message


def test_a_submission_waits_while_scorers_are_loaded(coordinator, scripted_run):
    run = scripted_run()

    def slow(got):
        time.sleep(0.6)
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = slow
    with Client(coordinator.url, timeout_s=0.2, patience_s=0) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(coordinator.requests("POST /v1/runs")) == 1
    scorers = {"scorers": [{"name": "exact"}] * 2, "load_timeout_s": 300, "timeout_s": 10}
    assert checking_s({"reward": scorers}) == 2 * 310 + CHECK_S


def sse(*ids: int) -> str:
    lines = ["retry: 1000\n\n: alive\n\n"]
    for number in ids:
        event = {"id": number, "type": "step", "time": 1.0, "run": "runs/r", "data": {"n": number}, "new": 1}
        lines.append(f"id: {number}\nevent: step\ndata: {json.dumps(event)}\n\n")
    return "".join(lines)


def test_events_go_on_where_the_stream_broke(client, coordinator):
    asked = []

    def stream(got):
        asked.append(got.headers["last-event-id"])
        return 200, {1: sse(1, 2) + "id: 3\ndata: {", 2: sse(2, 3)}.get(len(asked), sse(4))

    coordinator.routes["GET /v1/runs/r/events"] = stream
    coordinator.routes["GET /v1/runs/r"] = lambda got: (
        200,
        {"id": "r", "state": "RUNNING" if len(asked) < 2 else "SUCCEEDED"},
    )
    assert [event.id for event in client.events("r")] == [1, 2, 3, 4]
    assert asked == ["0", "2", "3"]


def test_events_outlive_a_coordinator_that_is_away(coordinator):
    coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "SUCCEEDED"})
    calls = []

    def stream(got):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionAbortedError
        return 200, sse(1)

    coordinator.routes["GET /v1/runs/r/events"] = stream
    with Client(coordinator.url, patience_s=20) as client:
        assert [event.id for event in client.events("r")] == [1]


def test_wait_says_what_is_waited_for(client, coordinator):
    view = {"name": "runs/r", "id": "r", "state": "RUNNING", "step": 3, "waiting_for": ["a lease on cpu:0"]}
    coordinator.routes["GET /v1/runs/r"] = (200, view)
    with pytest.raises(HeadraceError, match=r"runs/r is RUNNING .* at step 3: a lease on cpu:0") as caught:
        client.wait("r", timeout=0.1)
    assert caught.value.reason == "DEADLINE_EXCEEDED"


def test_wait_returns_the_end(client, coordinator):
    coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "RUNNING"})

    def end() -> None:
        time.sleep(0.3)
        coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "FAILED"})

    threading.Thread(target=end).start()
    assert client.wait("runs/r", timeout=10).state == "FAILED"


def test_steering_and_scaling(client, coordinator):
    for verb in ("pause", "resume", "cancel"):
        coordinator.routes[f"POST /v1/runs/r:{verb}"] = (200, {"id": "r", "state": verb.upper()})
    coordinator.routes["POST /v1/services/rollout:scale"] = lambda got: (200, {"kind": "rollout", **got.body})
    assert client.pause("r", now=True).state == "PAUSE"
    assert coordinator.requests("POST /v1/runs/r:pause")[0].query == {"now": ["true"]}
    assert (client.resume("r").state, client.cancel("r").state) == ("RESUME", "CANCEL")
    coordinator.routes["POST /v1/runs/r:set"] = lambda got: (
        200,
        {"id": "r", "wanted_ranks": got.body["trainer"]["ranks"]},
    )
    assert client.set("r", {"trainer.ranks": 2}).wanted_ranks == 2
    assert client.set("r", ["trainer.ranks=3"]).wanted_ranks == 3
    assert client.scale("rollout", 3) == 3
    drained = {"instance": "rollout-0", "incarnation": "i1"}
    coordinator.routes["POST /v1/instances/rollout-0:drain"] = (200, drained)
    assert client.drain("rollout-0") == "i1"


def test_trajectories_by_step_and_limit(client, coordinator):
    found = [{"step": 2, "prompt_ordinal": n, "completion": "8"} for n in range(5)]
    coordinator.routes["GET /v1/runs/r/trajectories"] = (200, {"trajectories": found})
    assert [item.prompt_ordinal for item in client.trajectories("r", step=2, limit=3)] == [0, 1, 2]
    assert coordinator.requests("GET /v1/runs/r/trajectories")[0].query["step"] == ["2"]


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
        "environment: {tasks: ['mine.py:Game', tools, suite/0], options: {tools: [mine.py:score], "
        "search: {corpus: mine.py}, mcp: [{command: [python, -m, ./mine.py, mine.py]}]}}"
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
        "tools": [f"{tmp_path / 'mine.py'}:score"],
        "search": {"corpus": str(tmp_path / "mine.py")},
        "mcp": [{"command": ["python", "-m", str(tmp_path / "mine.py"), "mine.py"]}],
    }
    (tmp_path / "mine.py").touch()
    file.write_text(
        "agent: {python: 'mine.py:play', command: [python, ./mine.py, --fast], verifiers: 'mine.py:load'}"
    )
    agent = {
        "python": f"{tmp_path / 'mine.py'}:play",
        "command": ["python", str(tmp_path / "mine.py"), "--fast"],
        "verifiers": f"{tmp_path / 'mine.py'}:load",
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
