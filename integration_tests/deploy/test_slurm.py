"""The Slurm script: a stub of `srun` starts its processes in network namespaces, as Slurm does on nodes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness.hosts import can_make_hosts, hosts
from harness.processes import ROOT, clean_environment
from harness.specs import small_spec

SCRIPT = ROOT / "deploy" / "slurm" / "headrace.sbatch"
SRUN = """#!/usr/bin/env bash
# One process a node. As the real one does, it ends all tasks with SIGKILL when it gets a signal, and passes none on.
while [[ ${1:-} == --* ]]; do shift; done
IFS=, read -ra nodes <<<"$STUB_NODES"
for number in "${!nodes[@]}"; do
  [ "${nodes[$number]}" = here ] || enter=(ip netns exec "${nodes[$number]}")
  SLURM_STEP_ID=0 SLURM_NODEID=$number SLURMD_NODENAME=node-$number "${enter[@]}" "$@" &
done
force() { echo "srun: forcing job termination" >&2; scancel --signal=KILL "$SLURM_JOB_ID"; exit 143; }
trap force TERM INT
wait
"""
SCANCEL = """#!/usr/bin/env python3
# Sends a signal to all processes of a job's steps, the batch script apart, as the real one does with --signal.
import os, signal, sys
name, job = sys.argv[1].partition("=")[2], sys.argv[2]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        variables = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
        if {b"SLURM_STEP_ID=0", f"SLURM_JOB_ID={job}".encode()} <= set(variables):
            os.kill(int(pid), signal.Signals[f"SIG{name}"])
    except OSError:
        continue
"""
HEADRACE = """#!/usr/bin/env bash
# Writes down what it is asked for; its fleet is a process that sleeps.
while [ $# -gt 0 ]; do
  case "$1" in up|join|down|status|run) did+=" $1" ;; --data-dir) own=$2 ;; esac
  shift
done
echo "${SLURM_NODEID:-batch}:$did" >>"$STUB_LOG"
case "$did" in
  " up" | " join")
    [ "${STUB_BROKEN:-}" = "$SLURM_NODEID" ] && exit 127
    mkdir -p "$own"
    (trap "" TERM; exec sleep 300) & # ends in order, or by SIGKILL
    echo "{\\"launcher_pid\\": $!}" >"$own/fleet.json"
    ;;
  " down")
    sleep 0.5 # saves a checkpoint
    kill -KILL "$(sed 's/[^0-9]//g' "$own/fleet.json")"
    echo "${SLURM_NODEID:-batch}: saved" >>"$STUB_LOG"
    ;;
  " run") [ -s "$STUB_LOG.watched" ] && exec sleep 300; echo '{"id": "r"}' | tee "$STUB_LOG.watched" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    """`slurm(nodes, argument, …)`: the environment and the command of a job, as the batch step has them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scancel").write_text(SCANCEL)
    (tools / "headrace").write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace_cli "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    shutil.copy(SCRIPT, tmp_path / "slurm_script")  # sbatch runs a copy, which no other node sees

    def job(nodes, *arguments, **variables):
        environment = clean_environment(
            SLURM_JOB_ID="7",
            SLURM_JOB_NUM_NODES=str(len(nodes)),
            SLURM_SUBMIT_DIR=str(tmp_path),
            STUB_NODES=",".join(nodes),
            **variables,
        )
        environment["PATH"] = f"{tools}:{os.environ['PATH']}"
        return environment, ["bash", str(tmp_path / "slurm_script"), *map(str, arguments)]

    return job


def test_the_script_says_what_it_needs_and_each_directive_is_one(slurm):
    environment, command = slurm([], "/nowhere.yaml")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "/nowhere.yaml is not there" in done.stderr
    environment.pop("SLURM_JOB_ID")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "run it by sbatch" in done.stderr
    directives = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", SCRIPT.read_text(), re.MULTILINE)
    assert set(directives) == {
        *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "requeue", "signal")
    }


@pytest.fixture
def quick_job(slurm, tmp_path):
    """Starts a job of two nodes on this host, whose `headrace` is a stub; returns it and the stub's log."""
    (tmp_path / "bin" / "headrace").write_text(HEADRACE)
    (tmp_path / "bin" / "headrace").chmod(0o755)
    spec, log = tmp_path / "run.yaml", tmp_path / "headrace.log"
    spec.touch()
    log.touch()
    jobs = []

    def start(**variables):
        own = {"HEADRACE_INTERFACE": "lo", "STUB_LOG": str(log), **variables}
        environment, command = slurm(["here", "here"], spec, **own)
        job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        jobs.append((environment, job))
        return job, log

    yield start
    for environment, job in jobs:
        subprocess.run(["scancel", "--signal=KILL", "7"], env=environment, check=True)
        job.kill()
        job.wait(10)


@pytest.mark.parametrize("ends", ["the run ends", "the time limit comes"])
def test_every_end_of_a_job_lets_each_node_save_its_part(quick_job, tmp_path, ends):
    job, log = quick_job()
    _until(lambda: log.read_text().count("run") == 2, job, log)
    if ends == "the run ends":
        watched = subprocess.run(
            ["pgrep", "-P", str(job.pid), "-x", "sleep"], capture_output=True, text=True, check=True
        )
        os.kill(int(watched.stdout), signal.SIGKILL)
    else:
        job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@… does
    job.wait(30)
    assert sorted(line for line in log.read_text().splitlines() if "saved" in line) == [
        "0: saved",
        "1: saved",
    ]
    assert not _of(tmp_path), "all processes of the job have ended"


def test_a_node_that_cannot_start_ends_the_job_with_the_reason(quick_job):
    job, log = quick_job(STUB_BROKEN="0")
    assert job.wait(30) == 1, log.read_text()
    assert "node 0: headrace up has ended with status 127; see " in job.stderr.read()


@pytest.mark.nightly
@pytest.mark.timeout(420)
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_a_job_trains_over_its_nodes_and_one_that_was_preempted_goes_on(slurm, tmp_path, tiny_model):
    spec = tmp_path / "run.yaml"
    spec.write_text(
        yaml.safe_dump(small_spec(tiny_model, steps=40, rollout__instances=2, checkpoint__interval_steps=0))
    )
    with hosts(tmp_path / "hosts", "a", "b") as (first, second):
        nodes = [first.namespace, second.namespace]
        variables = {"HEADRACE_INTERFACE": "eth9", "HEADRACE_DEVICES": "cpu:0,cpu:1"}
        environment, command = slurm(nodes, spec, **variables)
        command = ["ip", "netns", "exec", nodes[0], *command]
        log, shared = tmp_path / "job.log", {*Path("/dev/shm").glob("headrace-*")}
        with log.open("w") as output:
            job = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            metrics = tmp_path / "headrace-7" / "runs"
            _until(lambda: len(_steps(metrics)) >= 2, job, log)
            job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@… does
            job.wait(120)
        assert not _of(tmp_path), "all processes of the job have ended"
        assert {*Path("/dev/shm").glob("headrace-*")} <= shared, "nothing stays in shared memory"
        before = len(_steps(metrics))
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert again.returncode == 0, again.stdout + again.stderr + log.read_text()
        assert len(list(metrics.iterdir())) == 1, "the same run"
        assert 2 <= before < 40 == len(_steps(metrics)), "no step was made twice: the last one was saved"
        instances = (tmp_path / "headrace-7/slurm/node-1/logs").glob("rollout-*.log")
        assert list(instances), "the second node took part"


def _steps(runs: Path) -> list[str]:
    found = list(runs.glob("*/metrics.jsonl")) if runs.is_dir() else []
    lines = found[0].read_text().splitlines() if found else []
    return [line for line in lines if json.loads(line)["type"] == "step"]


def _of(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20).stdout
    return [line for line in listed.splitlines() if str(folder) in line and "pytest" not in line]


def _until(true, job, log, seconds=180):
    import time

    for _ in range(seconds * 5):
        if true():
            return
        assert job.poll() is None, log.read_text()
        time.sleep(0.2)
    raise AssertionError(log.read_text())
