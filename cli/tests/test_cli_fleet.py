"""The commands find the fleet that they speak to, with its token."""

from __future__ import annotations

import json
import os

import pytest
from headrace.client import Client
from headrace_cli.connection import connect, find_target
from headrace_cli.errors import CommandError
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import FleetLock, FleetState, ProcessState


def one_document(text: str):
    """The only line of standard output, as JSON."""
    (line,) = text.splitlines()
    return json.loads(line)


def test_token_from_the_environment(headrace, coordinator):
    coordinator.routes["GET /v1/runs"] = (200, {"runs": []})
    headrace("run", "list", HEADRACE_TOKEN="of mine")
    assert coordinator.received[0].headers["authorization"] == "Bearer of mine"


@pytest.fixture
def fleet_file(coordinator, tmp_path):
    """What a launcher writes into `.headrace` of the directory that commands run in."""
    folder = tmp_path / ".headrace"
    folder.mkdir()
    (folder / "http-token").write_text("of the fleet")
    state = {"url": coordinator.url, "token_file": str(folder / "http-token")}
    (folder / "fleet.json").write_text(json.dumps(state))
    return folder / "fleet.json"


@pytest.fixture
def living_fleet(coordinator, tmp_path):
    """A launcher's state on `.headrace` whose lock is held."""
    data_dir = DataDir.at(tmp_path / ".headrace")
    data_dir.prepare(0)
    processes = [ProcessState("rollout-0", "rollout", 4711)]
    FleetState(1, "running", coordinator.url, "", "", "", "", 0.0, processes=processes).write(data_dir)
    lock = FleetLock(data_dir.lock_file)
    assert lock.acquire()
    yield
    lock.release()


def test_instances_as_json_have_process_ids_and_schemas_on_request(headrace, coordinator, living_fleet):
    schema = json.dumps({"properties": {"digits": {}}})
    told = {"engines": ["vllm", f"mine={schema}"]}
    instance = {"name": "instances/rollout-0", "kind": "rollout", "state": "READY", "capabilities": told}
    coordinator.routes["GET /v1/instances"] = (200, {"instances": [instance]})
    (found,) = one_document(headrace("instances", "--json").stdout)["instances"]
    assert found["capabilities"] == {"engines": ["vllm", "mine"]} and found["pid"] == 4711
    (found,) = one_document(headrace("instances", "--json", "--schemas").stdout)["instances"]
    assert found["capabilities"] == told
    (found,) = one_document(headrace("instances", "--json", "--data-dir", "elsewhere").stdout)["instances"]
    assert "pid" not in found


def tokens_sent(coordinator):
    return [got.headers.get("authorization", "") for got in coordinator.received]


def test_the_token_of_the_fleet_is_found(headrace, coordinator, fleet_file, monkeypatch):
    coordinator.routes["GET /v1/runs"] = (200, {"runs": []})
    assert headrace("run", "list").returncode == 0
    with Client(coordinator.url.replace("127.0.0.1", "localhost")) as client:
        client.list()
    assert tokens_sent(coordinator) == ["Bearer of the fleet"] * 2
    with Client(coordinator.url, "") as client:
        client.list()
    fleet_file.write_text(fleet_file.read_text().replace(coordinator.url, "http://127.0.0.1:1"))
    headrace("run", "list")
    monkeypatch.setattr(os, "getuid", lambda: fleet_file.stat().st_uid + 1)  # the file is another user's
    fleet_file.write_text(fleet_file.read_text().replace("http://127.0.0.1:1", coordinator.url))
    headrace("run", "list")
    assert tokens_sent(coordinator)[2:] == ["", "", ""]


def test_a_missing_token_is_a_sentence_with_the_place(headrace, coordinator):
    refusal = {"reason": "UNAUTHENTICATED", "message": "the API token is missing", "problems": []}
    coordinator.routes["GET /v1/runs"] = (401, refusal)
    result = headrace("run", "list")
    assert result.returncode == 2
    assert "HEADRACE_TOKEN" in result.stderr and "--data-dir" in result.stderr


def test_open_prints_a_link(headrace, coordinator):
    coordinator.routes["POST /v1/links"] = (201, {"path": "/open?code=abc", "expires_in_s": 60})
    assert headrace("open").stdout == f"{coordinator.url}/open?code=abc\n"
    assert one_document(headrace("open", "--json").stdout) == {"url": f"{coordinator.url}/open?code=abc"}


def test_a_named_data_directory_without_a_fleet_never_means_another_fleet(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    target = find_target(None, tmp_path / "nobody")
    assert (target.url, target.known) == ("", False)
    with pytest.raises(CommandError, match="no fleet runs on the given --data-dir"), connect(target):
        pass
