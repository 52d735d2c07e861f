"""The launcher killed, started twice, or interrupted: a sentence, no orphans, and runs that go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import free_port, words_of
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace.client import HeadraceError


@pytest.fixture
def held(fleet, spec_of, gate):
    """A run that stands still in its third and last step, on a fleet that is up."""
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(steps=3, reward=gate.reward))
    gate.wait_until_held()
    return fleet.reach(run, 2)


def goes_on(fleet, run, gate):
    """Brings the fleet up again; the run succeeds."""
    gate.open()
    fleet.up()
    assert len(audit(fleet, fleet.succeed(run)).trained) == 3 * BATCH


def test_a_killed_launcher_leaves_no_orphans(fleet, held, gate):
    everybody = fleet.look()
    assert len(everybody) >= 7, "launcher, store, coordinator, three services and scorers' children"
    fleet.kill("launcher")
    wait_for(lambda: not [p for p in everybody if p.is_running() and p.status() != "zombie"], "its end", 60)
    goes_on(fleet, held, gate)


def test_more_than_the_host_holds_is_refused_and_a_newer_number_replaces_an_older_one(fleet):
    refused = fleet.headrace("scale", "rollout=999")
    assert refused.returncode == 2, refused.stderr
    assert "scale rollout=999: this host can hold" in refused.stderr
    assert "GiB each" in refused.stderr and "1 run now" in refused.stderr
    with pytest.raises(HeadraceError) as over_http:
        fleet.client.scale("rollout", 999)
    assert (over_http.value.status, over_http.value.problems[0].key) == (422, "count")
    assert fleet.client.scale("rollout", 4) == 4
    # rollout-1 starts, rollout-2 and rollout-3 wait for their turn or start too.
    assert fleet.client.scale("rollout", 1) == 1
    wait_for(lambda: rollouts(fleet) == ["rollout-0"], "one rollout process", 60)
    assert fleet.client.scale("rollout", 2) == 2
    fleet.ready("rollout-0", "rollout-1")
    assert fleet.client.scale("rollout", 1) == 1
    wait_for(lambda: rollouts(fleet) == ["rollout-0"], "one rollout process again", 60)


def rollouts(fleet):
    """Names of the rollout processes that live, registered or not."""
    found = [words_of(process) for process in fleet.look()]
    return sorted(words[words.index("--name") + 1] for words in found if "headrace_rollout" in words)


@pytest.mark.nightly  # quick: test_many_runs stops a trainer in order
def test_a_fleet_that_is_stopped_in_a_step_says_what_it_stops_and_goes_on(fleet, held, spec_of, gate):
    queued = fleet.submit(spec_of(name="queued", steps=1))
    before = {run.id for run in fleet.client.list()}
    fleet.look()
    log = fleet.data_dir / "logs" / "launcher.log"
    said_before = len(log.read_text().splitlines())
    stopped = fleet.headrace("down")
    assert stopped.returncode == 0
    told = [line for line in stopped.stderr.splitlines() if line.startswith("stopping the ")]
    assert told[0] == "stopping the trainers, at most 30 s", (
        "`down` shows what it waits for; short stops may pass unseen"
    )
    said = [json.loads(line) for line in log.read_text().splitlines()[said_before:]]
    order = [entry["what"] for entry in said if entry["message"] == "stopping"]
    assert order == ["the trainers", "the other instances", "the coordinator", "the store"]
    ends = [entry for entry in said if entry["message"] == "process ended"]
    assert [ends[0]["supervised"], ends[0]["status"]] == ["trainer-0", 0], "it ended in order, before all"
    assert [entry["supervised"] for entry in ends[-2:]] == ["coordinator", "store"]
    fleet.assert_nothing_left()
    goes_on(fleet, held, gate)
    assert {run.id for run in fleet.client.list()} == before
    assert len(audit(fleet, fleet.succeed(queued)).trained) == BATCH


def test_a_second_up_is_one_sentence(fleet, tmp_path):
    before = fleet.pid_of("launcher")
    same_directory = fleet.headrace("up", "--port", str(free_port()))
    with_its_port = Fleet(tmp_path / "other")
    same_port = with_its_port.headrace("up", "--port", str(fleet.port))
    for done, key in ((same_directory, "--data-dir"), (same_port, "--port")):
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1 and key in done.stderr
    assert "headrace down" in same_directory.stderr
    assert fleet.pid_of("launcher") == before and fleet.json("status")["instances"]
    with_its_port.assert_nothing_left()


def test_a_port_of_somebody_else_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = Fleet(tmp_path / "other")
        done = other.headrace("up", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    other.assert_nothing_left()


@pytest.fixture
def demo(tmp_path, tiny_model):
    """Starts a demo in a process group of its own, as a terminal does; (fleet, process, its messages)."""
    fleet = Fleet(tmp_path / "data")
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / "tiny")  # it makes none that is there
    messages = tmp_path / "messages"
    with messages.open("wb") as out:
        process = subprocess.Popen(
            fleet.command("demo", "--preset", "tiny", "--json"),
            env=fleet.variables("demo", {}),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,
        )
    yield fleet, process, lambda: messages.read_text(errors="replace")
    process.kill()
    process.wait()
    fleet.headrace("down")


# test_launcher ends fleets that are ready by Ctrl-C and by SIGTERM, on stand-ins for the services.
@pytest.mark.nightly  # quick: Ctrl-C while the fleet starts, below
@pytest.mark.parametrize(
    ("when", "signal_number"),
    [("is RUNNING", signal.SIGINT), ("fleet ready", signal.SIGINT), ("fleet ready", signal.SIGTERM)],
)
def test_an_interrupted_demo_stops_cleanly(demo, when, signal_number):
    fleet, process, messages = demo
    wait_for(lambda: when in messages() or process.poll() is not None, f"the demo to say {when!r}", 300)
    assert process.poll() is None, messages()
    assert fleet.look()
    # Ctrl-C reaches the whole foreground group, not the command alone.
    os.killpg(process.pid, signal_number)
    assert process.wait(90) == 130, messages()
    assert "interrupted" in messages() and "Traceback" not in messages()
    fleet.assert_nothing_left()


def test_ctrl_c_while_the_fleet_starts(demo):
    fleet, process, messages = demo
    wait_for(lambda: fleet.runs("launcher"), "the launcher")
    fleet.look()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(90) == 130, messages()
    assert "Traceback" not in messages()
    fleet.assert_nothing_left()
