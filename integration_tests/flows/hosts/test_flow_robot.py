"""A robot's host that nobody reaches: it joins by connections of its own, learns, loses its link and comes back."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.hosts import Host, at, can_make_hosts, hosts, options, ready, submit
from harness.processes import ROOT, clean_environment

pytestmark = [
    pytest.mark.nightly,  # Its quick twin, on one host, is plugins/robots/tests/simulator/test_robots_robot.py.
    pytest.mark.timeout(420),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
]
MUJOCO = ROOT / ".envs" / "metaworld" / "bin" / "python"


def task() -> tuple[str, tuple[str, ...]]:
    """The stand-in, and what `join` needs for it: MuJoCo's arm where it is installed."""
    return ("reach", ("--sim", "metaworld")) if MUJOCO.is_file() else ("pendulum", ())


def spec(name: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((ROOT / "examples/robots/reach.yaml").read_text())
    made["environment"] |= {"tasks": [name], "max_episode_steps": 20}
    made["model"]["policy"]["hidden"] = [32, 32]
    made["algorithm"]["options"] = {"updates_per_action": 0.5, "batch_size": 32, "learning_starts": 20}
    return made | {"evaluation": {"every": 0}, "steps": 4000, "checkpoint": {"interval_steps": 5}}


def join(head: Host, host: Host, robot: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The robot's host joins, and nobody reaches it."""
    shutil.copy(head.data_dir / "token", host.data_dir / "head-token")
    variable = f"HEADRACE_SIMULATOR_ROBOT={ROOT}/examples/robots/stand_in.py:{robot}"
    words = ["env", variable, sys.executable, "-m", "headrace_cli", "join", head.address, "--name", host.name]
    words += [
        "--token-file",
        str(host.data_dir / "head-token"),
        "--data-dir",
        str(host.data_dir),
        "--outgoing",
    ]
    words += [*options({"simulator": 1}), "--devices", "cpu:1", *more, "--json"]
    run = {"env": clean_environment(), "cwd": ROOT, "capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(host.command(*words), stdin=subprocess.DEVNULL, **run)  # type: ignore[call-overload,no-any-return]


def listening(host: Host) -> set[str]:
    """Addresses at which anything listens on a host, as the kernel writes them."""
    shown = subprocess.run(
        host.command("cat", "/proc/net/tcp", "/proc/net/tcp6"), capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in shown.stdout.splitlines() if ":" in line and "local_address" not in line]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def test_a_robot_behind_a_nat_learns_and_its_cut_link_loses_nothing(tmp_path: Path) -> None:
    name, more = task()
    with hosts(tmp_path, "head", "robot") as (head, robot):
        head.json(
            "up",
            "--listen",
            head.address,
            "--devices",
            "cpu:0",
            *options({"trainer": 1, "rollout": 1, "reward": 1}),
        )
        done = join(head, robot, name, *more)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{robot.logs()}"
        found = ready(head, "trainer-0", "rollout-0", "reward-0", "simulator-0.robot")["simulator-0.robot"]
        assert found["address"].startswith(head.address)
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
        assert listening(robot) <= loopback, "nothing listens but on the loopback"
        run = submit(head, tmp_path, spec(name))
        before = at(head, run, 8)

        robot.cut_off()
        time.sleep(12)  # longer than an episode is silent, shorter than a lease
        robot.connect()
        after = at(head, run, before["step"] + 3)
        assert after["counts"]["duplicates"] == 0

        robot.cut_off()
        time.sleep(45)  # beyond the leases
        robot.connect()
        last = at(head, run, after["step"] + 3)
        # Every episode before the frontier was trained, or dropped with a reason: none is missing, none counted twice.
        assert last["counts"]["duplicates"] == 0, last["counts"]
        assert last["counts"]["trained"] + last["counts"]["dropped"] >= last["step"], last["counts"]
        head.json("run", "cancel", run)
