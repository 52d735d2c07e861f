"""The Slurm script: a stub of `srun` starts its processes in network namespaces, as Slurm does on nodes."""

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
# One process a node; a signal goes to all of them, as Slurm's does.
while [[ ${1:-} == --* ]]; do shift; done
children=()
IFS=, read -ra nodes <<<"$STUB_NODES"
for number in "${!nodes[@]}"; do
  SLURM_NODEID=$number SLURMD_NODENAME=node-$number ip netns exec "${nodes[$number]}" "$@" &
  children+=($!)
done
trap 'kill -TERM "${children[@]}" 2>/dev/null' TERM
for child in "${children[@]}"; do while kill -0 "$child" 2>/dev/null; do wait "$child"; done; done
"""


@pytest.fixture
def slurm(tmp_path):
    """`slurm(nodes, argument, …)`: the environment and the command of a job, as the batch step has them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
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


@pytest.mark.nightly
@pytest.mark.timeout(420)
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_a_job_trains_over_its_nodes_and_one_that_was_preempted_goes_on(slurm, tmp_path, tiny_model):
    spec = tmp_path / "run.yaml"
    spec.write_text(yaml.safe_dump(small_spec(tiny_model, steps=40, rollout__instances=2)))
    with hosts(tmp_path / "hosts", "a", "b") as (first, second):
        nodes = [first._namespace, second._namespace]
        variables = {"HEADRACE_INTERFACE": "eth9", "HEADRACE_DEVICES": "cpu:0,cpu:1"}
        environment, command = slurm(nodes, spec, **variables)
        command = ["ip", "netns", "exec", nodes[0], *command]
        log = tmp_path / "job.log"
        with log.open("w") as output:
            job = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            metrics = tmp_path / "headrace-7" / "runs"
            _until(lambda: len(_steps(metrics)) >= 2, job, log)
            job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@… does
            job.wait(120)
        assert not _of(tmp_path), "all processes of the job have ended"
        before = len(_steps(metrics))
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert again.returncode == 0, again.stdout + again.stderr + log.read_text()
        assert len(list(metrics.iterdir())) == 1, "the same run"
        assert 2 <= before < 40 <= len(_steps(metrics))
        instances = (tmp_path / "headrace-7/slurm/node-1/logs").glob("rollout-*.log")
        assert list(instances), "the second node took part"


def _steps(runs: Path) -> list[str]:
    found = list(runs.glob("*/metrics.jsonl")) if runs.is_dir() else []
    return found[0].read_text().splitlines() if found else []


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
