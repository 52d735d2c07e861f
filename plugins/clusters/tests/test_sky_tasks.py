"""SkyPilot's tasks: their commands with a stub of `headrace`, and each night by SkyPilot's own parser."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "examples" / "clusters"
HEAD = f"127.81.{os.getpid() % 250}.1"
"""An address of the loopback that no fleet of another test has; the port is the one that the task names."""
STUB = """#!/bin/bash
echo "$*" >>"$LOG"
[ "$1" = instances ] && for number in $(seq 8); do echo '"kind": "rollout"'; done
exit 0
"""
PARSE = """
import sys, yaml
from sky import Task
def read(name, **more):
    return Task.from_yaml_config(yaml.safe_load(open(f"{sys.argv[1]}/sky-{name}.yaml")), **more)
one, four = read("one-node"), read("four-nodes", secrets_overrides=[("FLEET_TOKEN", "secret")])
for task in (one, four):
    (resources,) = task.resources
    print(task.num_nodes, dict(resources.accelerators), sorted(task.secrets))
"""


@pytest.fixture
def run(tmp_path):
    """`run(name, rank, variables)`: a task's commands on one of its nodes; what they asked of `headrace`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "headrace").write_text(STUB)
    (tmp_path / "bin" / "sleep").write_text("#!/bin/bash\n/bin/sleep 0.05\n")
    for tool in (tmp_path / "bin").iterdir():
        tool.chmod(0o755)

    def start(name, rank, **changed):
        task = yaml.safe_load((TASKS / f"sky-{name}.yaml").read_text())
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "LOG": str(tmp_path / f"log-{rank}"),
            "SPEC": "run.yaml",
            "FLEET_TOKEN": "secret",
            "SKYPILOT_NUM_GPUS_PER_NODE": "2",
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": f"{HEAD}\n127.0.0.2\n127.0.0.3\n127.0.0.4",
        }
        command = ["bash", "-c", task["run"]]
        return subprocess.Popen(
            command, env=environment | changed, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )

    return start


def asked(tmp_path, rank):
    return (tmp_path / f"log-{rank}").read_text().splitlines()


def test_a_node_alone_starts_a_fleet_makes_the_run_and_ends(run, tmp_path):
    assert run("one-node", 0).wait(30) == 0
    assert asked(tmp_path, 0) == [
        "up --data-dir fleet --trainer 2 --rollout 2",
        "run submit run.yaml --data-dir fleet --watch",
        "down --data-dir fleet",
    ]


def test_the_first_of_four_nodes_leads_and_the_others_join_until_it_has_ended(run, tmp_path):
    assert run("four-nodes", 0).wait(30) == 0
    assert (tmp_path / "fleet" / "token").read_text() == "secret"
    assert (tmp_path / "fleet" / "token").stat().st_mode & 0o777 == 0o600
    assert asked(tmp_path, 0) == [
        f"up --listen {HEAD} --data-dir fleet --trainer 2 --rollout 2",
        "instances --data-dir fleet --json",
        "run submit run.yaml --data-dir fleet --watch",
        "down --data-dir fleet",
    ]
    with socket.create_server((HEAD, 8470)):  # the head
        joined = run("four-nodes", 3)
        with pytest.raises(subprocess.TimeoutExpired):
            joined.wait(1)
        name = f"join {HEAD} --token-file fleet/token --name node-3 --data-dir fleet --rollout 2"
        assert asked(tmp_path, 3) == [name]
    assert joined.wait(30) == 0
    assert asked(tmp_path, 3)[1:] == ["down --data-dir fleet"]


def test_four_nodes_without_a_token_end_with_the_option_that_is_missing(run, tmp_path):
    task = run("four-nodes", 1, FLEET_TOKEN="")
    _, errors = task.communicate(timeout=30)
    assert task.returncode != 0 and not (tmp_path / "log-1").exists()
    told = "FLEET_TOKEN: is missing: start the task with --secret FLEET_TOKEN=$(openssl rand -hex 32)"
    assert errors.rstrip().endswith(told)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_skypilots_own_parser_reads_the_tasks():
    subprocess.run(["sh", "ci/sky.sh", sys.executable], cwd=ROOT, check=True)
    python = ROOT / ".envs" / "sky" / "bin" / "python"
    done = subprocess.run([python, "-c", PARSE, TASKS], capture_output=True, text=True, timeout=300, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert lines == ["1 {'H100': 8} []", "4 {'H100': 8} ['FLEET_TOKEN']"], done.stderr
