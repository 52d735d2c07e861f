"""What a host must know, and have, to join a fleet."""

from __future__ import annotations

import json
import time
from importlib.metadata import version

import pytest
from headrace_cli.errors import CommandError
from headrace_cli.launcher import hosts
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.encryption import make_files
from headrace_cli.launcher.hosts import address_towards, find_head, join_command, require_own_address
from headrace_cli.launcher.plan import FleetPlan, Head


@pytest.fixture
def token(tmp_path):
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    return tmp_path / "token"


def answer(coordinator, **fields):
    body = {"status": "ok", "version": version("headrace"), "time": time.time(), "grpc_port": 8471} | fields
    coordinator.routes["GET /healthz"] = (200, body)
    return coordinator.url.removeprefix("http://")


def test_the_head_says_where_instances_register(coordinator, token):
    head, told = find_head(answer(coordinator), token)
    assert head == Head(coordinator.url, "127.0.0.1:8471", str(token)) and told == []


def test_clocks_apart_are_told(coordinator, token):
    _, (told,) = find_head(answer(coordinator, time=time.time() - 60), token)
    assert "60 s apart" in told


def test_what_keeps_a_host_from_joining_is_named(coordinator, token, tmp_path):
    with pytest.raises(CommandError, match=r"runs Headrace 0\.0\.1, this host") as other:
        find_head(answer(coordinator, version="0.0.1"), token)
    assert other.value.exit_code == 2 and "install 0.0.1 here" in str(other.value.problems)
    with pytest.raises(CommandError, match="is not there") as missing:
        find_head(answer(coordinator), tmp_path / "none")
    assert "copy `token`" in str(missing.value.problems)
    coordinator.routes.clear()
    with pytest.raises(CommandError, match=r"headrace up --listen 127\.0\.0\.1"):
        find_head(coordinator.url.removeprefix("http://"), token)


def test_an_address_of_another_host_is_refused_with_those_of_this_one(monkeypatch):
    monkeypatch.setattr(hosts, "outward_addresses", lambda: {"10.0.0.5": "eth3"})
    with pytest.raises(CommandError, match="no address of this host") as refused:
        require_own_address("--listen", "0.0.0.0")
    assert "10.0.0.5" in str(refused.value.problems)
    require_own_address("--listen", "10.0.0.5")
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_names_are_unique_over_hosts():
    counts = {"rollout": 2, "trainer": 0, "reward": 0, "simulator": 0}
    plan = FleetPlan("/d", 0, counts, host="b", head=Head("http://h:1", "h:2", "/token"))
    assert plan.instance_names == ["rollout-0.b", "rollout-1.b"]
    assert FleetPlan.from_json(plan.to_json()) == plan


def test_a_copy_of_the_token_that_others_can_read_is_refused(coordinator, token):
    token.chmod(0o644)
    with pytest.raises(CommandError, match=f"open to other users .*chmod 600 {token}") as refused:
        find_head(answer(coordinator), token)
    assert refused.value.exit_code == 2


def test_the_head_tells_the_whole_line_with_which_hosts_join(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "keys"))
    place = DataDir.at(tmp_path / "data")
    assert join_command("http://127.0.0.1:8470", place) == ""
    assert join_command("http://10.0.0.1:8470", place) == "headrace join 10.0.0.1:8470 --token-file token"
    place.tls.mkdir(parents=True)
    pin = make_files(place, "10.0.0.1", "head")
    (place.tls / "ca.pem").write_bytes((place.authority_keys / "ca.pem").read_bytes())
    line = f"headrace join 10.0.0.1:8470 --token-file token --fingerprint {pin}"
    assert join_command("https://10.0.0.1:8470", place) == line
    other = DataDir.at(tmp_path / "other")
    other.tls.mkdir(parents=True)
    (other.tls / "ca.pem").write_bytes((place.tls / "ca.pem").read_bytes())
    assert "--tls-files" in join_command("https://10.0.0.1:8470", other), "an authority of one's own"


def test_hosts_are_listed_and_the_head_says_how_others_join(headrace, coordinator):
    rows = [
        {"name": "instances/reward-0", "kind": "reward", "state": "READY", "host": "a", "devices": []},
        {
            "name": "instances/rollout-0.b",
            "kind": "rollout",
            "state": "READY",
            "host": "b",
            "devices": ["b/cpu:0"],
        },
    ]
    coordinator.routes["GET /v1/instances"] = (200, {"instances": rows})
    done = headrace("hosts", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout) == {
        "hosts": [
            {"host": "a", "instances": ["reward-0"], "devices": []},
            {"host": "b", "instances": ["rollout-0.b"], "devices": ["b/cpu:0"]},
        ],
        "join": "",
    }
    assert "rollout-0.b" in headrace("hosts").stdout


def test_another_host_is_scaled_by_its_name(headrace, coordinator):
    coordinator.routes["POST /v1/services/rollout:scale"] = (200, {"kind": "rollout", "count": 2})
    assert headrace("scale", "rollout=2", "--host", "b").returncode == 0
    assert coordinator.requests("POST /v1/services/rollout:scale")[0].body == {"count": 2, "host": "b"}


def test_a_second_launcher_of_a_fleet_beside_the_first_brings_its_processes(tmp_path):
    """As another host would, on this machine: what is missing here is only the network between them."""
    import subprocess
    import sys

    from headrace_servicekit.rpc.addresses import free_port

    def say(folder, *arguments):
        command = [sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(tmp_path / folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)

    none = ("--rollout", "0", "--trainer", "0", "--simulator", "0", "--json")
    port = str(free_port())
    try:
        up = say("head", "up", "--port", port, "--reward", "1", *none)
        assert up.returncode == 0, up.stdout
        options = ("--token-file", str(tmp_path / "head/token"), "--name", "b", "--reward", "1", *none)
        joined = say("b", "join", f"127.0.0.1:{port}", *options)
        assert joined.returncode == 0, joined.stdout
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            shown = json.loads(say("head", "instances", "--json").stdout)["instances"]
            if {item["name"] for item in shown if item["state"] == "READY"} == {"reward-0", "reward-0.b"}:
                break
        else:
            pytest.fail(f"not both are ready: {shown}")
        assert {item["name"]: item["host"] for item in shown}["reward-0.b"] == "b"
        taken = say("c", "join", f"127.0.0.1:{port}", *options)
        assert (
            taken.returncode == 2 and "another launcher runs processes of this fleet as host" in taken.stdout
        )
    finally:
        for folder in ("c", "b", "head"):
            say(folder, "down")
