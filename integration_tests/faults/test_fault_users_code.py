"""Users' code that ends the service that runs it: its run FAILS with its name, and a neighbour goes on uncharged.

Where the service is root's, the code is another user, which cannot end its service.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from harness.environments import corridor
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT
from harness.waiting import wait_for
from headrace.client import Run

LIMIT_S = 90.0
"""From when the code begins to do harm to the end of its run."""
# Where Landlock keeps it from signalling its parent, a limit of CPU seconds that is used up ends it.
PREAMBLE = """
import ctypes, os, pathlib, resource, time

NOW = pathlib.Path(__file__).with_suffix(".now")


def end_parent():
    try:
        os.kill(os.getppid(), 9)
    except PermissionError:
        try:
            resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))
        except PermissionError:  # as root: this code is another user
            print("users' code was refused to end its service", flush=True)
            raise
    time.sleep(60)


def end_itself():
    ctypes.string_at(0)

"""
SCORER = """
def score(prompt, completion, reference, metadata):
    if completion and NOW.exists():
        {deed}()
    return -0.05 * len(completion)
"""
ROBOT = """
import sys

sys.path.append({root!r})
from harness.environments.corridor import Corridor


class Evil(Corridor):
    def step(self, action):
        if NOW.exists():
            {deed}()
        return super().step(action)


def make_env(directory):
    return Evil(directory)
"""
TALK = """
class Evil:
    def reset(self, seed, item):
        return [{{"role": "user", "content": "?"}}]

    def step(self, message):
        if NOW.exists():
            {deed}()
        return [], -0.05 * len(message["content"]), True
"""
REFUSED = "users' code was refused to end its service"
WORDS = {"end_parent": "instances died one after the other", "end_itself": "killed by signal 11"}


class Users:
    """Users whose code does a deed, each with a run of its own, beside a robot's run that shares their services."""

    def __init__(self, fleet: Fleet, spec_of: Any, folder: Path) -> None:
        self.fleet, self.spec_of, self.folder = fleet, spec_of, folder
        self.neighbour = self.submit(self.robot(f"{corridor.__file__}:make_env"))

    def submit(self, spec: dict[str, Any]) -> Run:
        """A run on one rollout and one trainer that would go on for long."""
        more = {"rollout": {"instances": 1}, "trainer": {"ranks": 1}, "steps": 5000, "export": False}
        return self.fleet.submit({**spec, **more, "placement": {"mode": "collocated"}})

    def robot(self, task: str) -> dict[str, Any]:
        return {
            "name": "robot",
            "workflow": "embodied",
            "model": {"policy": {"kind": "mlp", "hidden": [16], "log_std": 0.0}},
            "environment": {
                "tasks": [task],
                "options": {"directory": str(self.folder)},
                "count": 2,
                "max_episode_steps": 4,
            },
            "data": {"options": {"starts": 64}},
            "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 4},
            "optimizer": {"lr": 1.0e-3},
        }

    def talk(self, task: str) -> dict[str, Any]:
        spec = self.spec_of()
        kept = ("name", "model", "sampling", "algorithm", "optimizer")
        environment = {"tasks": [task], "count": 4, "max_episode_steps": 2}
        return {**{key: spec[key] for key in kept}, "workflow": "agentic", "environment": environment}

    def scored(self, scorer: str) -> dict[str, Any]:
        return dict(self.spec_of(reward={"scorers": [{"name": scorer}]}))

    def begin(self, kind: str, deed: str) -> tuple[Run, str]:
        """A run whose code does a deed from now on, and the name of that code."""
        code, name, spec = {
            "scorer": (SCORER, "score", self.scored),
            "robot": (ROBOT, "make_env", self.robot),
            "talk": (TALK, "Evil", self.talk),
        }[kind]
        file = self.folder / f"{kind}_{deed}.py"
        file.write_text(PREAMBLE + code.format(deed=deed, root=str(ROOT / "integration_tests")))
        evil = self.submit(spec(f"{file}:{name}"))
        for run in (self.neighbour, evil):
            self.fleet.reach(run, 1)
        file.with_suffix(".now").touch()
        return evil, f"{file}:{name}"

    def check(self, kind: str, deed: str) -> None:
        """The run FAILS with the name of its code; where that is refused the deed, its service lives on besides."""
        services, began = self.services(), time.monotonic()
        evil, name = self.begin(kind, deed)
        if deed == "end_parent" and os.getuid() == 0:
            wait_for(lambda: REFUSED in self.fleet.logs(200), "the deed to be refused", LIMIT_S)
            assert self.services() == services, "the code has ended its service"
            now = self.fleet.client.get(evil.id)
            assert now.state == "RUNNING" or name in now.reason, now
            self.fleet.client.cancel(evil.id)
            return
        failed = self.fleet.client.wait(evil.id, LIMIT_S)
        print(f"{failed.state} after {time.monotonic() - began:.1f} s: {failed.reason}")
        assert failed.state == "FAILED" and name in failed.reason and WORDS[deed] in failed.reason

    def services(self) -> dict[str, str]:
        """The processes in which users' code is at work, by name."""
        found = self.fleet.client.instances()
        return {each.name: each.incarnation for each in found if each.kind in ("reward", "simulator")}

    def check_neighbour(self) -> None:
        """The neighbour goes on, and was charged nothing."""
        fleet, neighbour = self.fleet, self.neighbour
        fleet.reach(neighbour, fleet.client.get(neighbour.id).step + 3)
        fleet.client.cancel(neighbour.id)
        ended = fleet.client.wait(neighbour.id, LIMIT_S)
        assert (ended.state, ended.recoveries) == ("CANCELLED", 0), ended
        audit(fleet, ended)


def check(own_fleet: Any, spec_of: Any, folder: Path, *deeds: tuple[str, str]) -> None:
    """One fleet, in which users do their deeds one after the other."""
    with own_fleet("--rollout", "2", "--trainer", "2", "--simulator", "1") as fleet:
        users = Users(fleet, spec_of, folder)
        for kind, deed in deeds:
            users.check(kind, deed)
        users.check_neighbour()


def test_a_scorer_that_kills_its_parent(own_fleet, spec_of, tmp_path):
    check(own_fleet, spec_of, tmp_path, ("scorer", "end_parent"))


@pytest.mark.nightly  # quick: test_simulator_faults, a child that dies
def test_a_robots_environment_that_segfaults_and_one_that_kills_its_parent(own_fleet, spec_of, tmp_path):
    check(own_fleet, spec_of, tmp_path, ("robot", "end_itself"), ("robot", "end_parent"))


@pytest.mark.nightly
def test_a_conversation_that_segfaults_and_one_that_kills_its_parent(own_fleet, spec_of, tmp_path):
    check(own_fleet, spec_of, tmp_path, ("talk", "end_itself"), ("talk", "end_parent"))
