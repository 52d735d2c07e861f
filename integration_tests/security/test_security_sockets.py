"""Every listening socket of a fleet is in SECURITY.md's table, and listens where --listen says."""

from __future__ import annotations

import pytest
from harness.fleet import Fleet
from harness.processes import free_port
from harness.sockets import Listening, listening, rows, watched

LOOPBACK = {"127.0.0.1", "::1"}
RUNS = {
    "two ranks": {"trainer__ranks": 2, "steps": 2},
    "weights by broadcast": {"weights": {"transports": ["collective", "grpc"]}, "steps": 3},
    "helpers": {
        "steps": 2,
        "sampling__max_new_tokens": 60,
        "rollout__instances": 2,
        "trainer": {"helpers": 1, "micro_batch_tokens": 96, "warmup": {"steps": 0}},
        "reward": {"scorers": [{"name": "length", "options": {"target": 1, "limit": 60}}]},
        "checkpoint": {"enabled": False},
    },
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    counts = ("--simulator", "0", "--trainer", "2", "--rollout", "2")
    sessions = ("--sessions-grpc", str(free_port()))
    with Fleet(tmp_path_factory.mktemp("sockets") / "data", *counts, *sessions) as up:
        up.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1", "reward-0")
        yield up


def check(found: set[Listening]) -> None:
    table = rows()
    for each in sorted(found, key=str):
        places = {row.place for row in table if row.process == each.process}
        if each.host == "unix":
            assert "a file" in places, each
        else:
            assert each.host in LOOPBACK, f"{each} does not listen where --listen says"
            assert places - {"a file"}, f"{each} is not in SECURITY.md"


def test_an_idle_fleet_has_one_port_a_service_and_those_of_its_users(fleet):
    found = {each for each in listening(fleet) if each.host != "unix"}
    check(listening(fleet))
    counts = {kind: sum(each.process == kind for each in found) for kind in {each.process for each in found}}
    assert counts == {"coordinator": 3, "rollout": 2, "trainer": 2, "reward": 1}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_adds_only_what_the_table_says(fleet, spec_of, kind):
    idle = listening(fleet)
    with watched(fleet) as seen:
        fleet.succeed(fleet.submit(spec_of(**RUNS[kind])))
    check(seen)
    added = {each.process for each in seen - idle if each.host != "unix"}
    assert added and added <= {row.process for row in rows() if "everybody" in row.who}
