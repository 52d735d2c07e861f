"""Each end of a job ends the fleet in order on all nodes, saves the run where it is not over, and says what has become
of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest


def until(done, job, stubbed, seconds=60):
    deadline = time.monotonic() + seconds
    while not done():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, stubbed.log
        time.sleep(0.02)


def saved(stubbed):
    return sorted(line for line in stubbed.log if line.endswith("saved"))


def test_a_job_ends_with_its_run_and_a_later_one_in_its_directory_finds_it(
    stubbed, scripted_run, coordinator
):
    scripted_run(3, 0.1)
    out, errors = (job := stubbed.start()).communicate(timeout=60)
    assert job.returncode == 0, out + errors
    assert "run r-1 is SUCCEEDED" in out and "step 3/3" in out
    assert saved(stubbed) == ["n1: saved", "n2: saved"]
    out, errors = (again := stubbed.start()).communicate(timeout=60)
    assert again.returncode == 0, out + errors
    assert "run r-1 goes on after step 3" in out and "step 3/3" not in out, "told once"
    assert len(coordinator.requests("POST /v1/runs")) == 1


@pytest.mark.parametrize("requeues", [True, False])
def test_near_the_time_limit_the_run_is_paused_before_the_fleet_ends(
    stubbed, paused_run, coordinator, requeues
):
    job = stubbed.start(*(["--requeue-at-limit"] if requeues else []))
    until(lambda: coordinator.requests("GET /v1/runs/r-1/metrics"), job, stubbed)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    job.send_signal(
        signal.SIGTERM
    )  # the limit itself, or somebody who does not wait: what goes on ends in order
    out, errors = job.communicate(timeout=60)
    assert saved(stubbed) == ["n1: saved", "n2: saved"]
    (pause,) = coordinator.requests("POST /v1/runs/r-1:pause")
    assert pause.body == {"now": True} or pause.query.get("now")
    assert (stubbed.folder / "data" / "slurm" / "paused").exists(), "so that the next start resumes it"
    if requeues:
        assert stubbed.log[-1] == "requeue 7", "once nothing of the fleet is left"
        assert "is saved after step" in out and "queued again" in out
        return
    assert job.returncode == 1
    assert "the time limit is near; run r-1 is saved after step" in errors and "--requeue-at-limit" in errors
    again = stubbed.start()
    until(lambda: coordinator.requests("POST /v1/runs/r-1:resume"), again, stubbed)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)


def test_a_job_of_an_array_ends_its_own_fleet_alone(stubbed, paused_run, coordinator):
    # One of them has the array's id, by which Slurm's programs mean all of it.
    stubbed.environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"}
    job = stubbed.start("--requeue-at-limit")
    until(lambda: coordinator.requests("GET /v1/runs/r-1/metrics"), job, stubbed)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    asked = {line for line in stubbed.log if line.startswith(("scancel", "requeue"))}
    assert asked == {"scancel --signal=TERM 7_4", "requeue 7_4"}


def test_a_job_that_somebody_ends_is_not_queued_again(stubbed, paused_run, coordinator):
    job = stubbed.start("--requeue-at-limit")
    until(lambda: coordinator.requests("GET /v1/runs/r-1/metrics"), job, stubbed)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 143 and "started again, it goes on with its run" in errors
    assert saved(stubbed) == ["n1: saved", "n2: saved"]
    assert "requeue 7" not in stubbed.log


@pytest.mark.parametrize("broken", ["n1", "n2"])
def test_a_node_that_cannot_start_ends_the_job_with_its_sentence(stubbed, scripted_run, broken):
    scripted_run(1000, 0.2)
    (stubbed.folder / "broken").write_text(broken)
    _, errors = (job := stubbed.start()).communicate(timeout=60)
    assert job.returncode == 1
    assert errors.index("--listen: is broken; mend it") < errors.index(
        f"node {broken} has ended with status 2"
    )
    assert saved(stubbed) == (["n1: saved"] if broken == "n2" else [])


def test_a_part_that_is_lost_starts_again(stubbed, scripted_run, coordinator):
    scripted_run(1000, 0.2)
    job = stubbed.start()
    until(lambda: coordinator.requests("GET /v1/runs/r-1/metrics"), job, stubbed)
    task = stubbed.folder / "tasks" / "n2"
    os.kill(int(task.read_text()), signal.SIGKILL)
    until(lambda: stubbed.log.count("n2: join") == 2, job, stubbed)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert "node n2 has lost its part of the fleet (status 137), which starts again" in errors


PART = """
import sys
from pathlib import Path
from headrace_clusters.slurm.part import run_part
sys.exit(run_part(Path(sys.argv[1]), ["bash", "-c", "trap 'exit 5' TERM; echo begun; while :; do sleep 0.05; done"]))
"""


def test_a_part_stays_until_the_heads_trainers_have_saved(tmp_path):
    def head_is(phase):
        names = ("url", "grpc_address", "token_file", "shared_memory", "redis_url")
        state = {
            "launcher_pid": 1,
            "phase": phase,
            "started_at": 0,
            "processes": [],
            **dict.fromkeys(names, ""),
        }
        (tmp_path / "fleet.new").write_text(json.dumps(state))
        (tmp_path / "fleet.new").replace(tmp_path / "fleet.json")

    head_is("running")
    command = [sys.executable, "-c", PART, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as part:
        assert part.stdout.readline() == "begun\n"
        part.send_signal(signal.SIGTERM)
        head_is("stopping the trainers, at most 30 s")
        with pytest.raises(subprocess.TimeoutExpired):
            part.wait(0.6)
        head_is("stopping the other instances, at most 5 s")
        assert part.wait(20) == 5
