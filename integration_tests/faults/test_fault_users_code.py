"""Users' code that ends the service that runs it: its run FAILS with its name, and a neighbour goes on uncharged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from headrace.client import Run

LIMIT_S = 90.0
"""From the first death of the service to the end of the run that causes it."""
WORKERS = ("rollout-0", "rollout-1", "trainer-0", "trainer-1")
# Where Landlock keeps it from signalling its parent, a limit of CPU seconds that is used up ends it.
ENDS_ITS_PARENT = """
import os, pathlib, resource, time

NOW = pathlib.Path(__file__).with_name("now")


def end_parent():
    if NOW.exists():
        try:
            os.kill(os.getppid(), 9)
        except PermissionError:
            resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))
        time.sleep(60)

"""
SCORER = (
    ENDS_ITS_PARENT
    + """
def score(prompt, completion, reference, metadata):
    if completion:
        end_parent()
    return -0.05 * len(completion)
"""
)
ENVIRONMENT = (
    ENDS_ITS_PARENT
    + """
import ctypes
import gymnasium
import numpy as np


class Cart(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, way):
        self.way = way

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self.at, {}

    def step(self, action):
        if self.way == "segfault" and NOW.exists():
            ctypes.string_at(0)
        if self.way == "kill":
            end_parent()
        self.at = self.at + action.clip(-1.0, 1.0).astype(np.float32)
        return self.at, -float(abs(self.at[0])), False, False, {}


def make_cart(way):
    return Cart(way)
"""
)


def check(fleet: Fleet, evil: Run, neighbour: Run, now: Path, *named: str) -> None:
    """From when `now` exists the code of `evil` ends its service."""
    for run in (evil, neighbour):
        fleet.reach(run, 1)
    now.touch()
    began = time.monotonic()
    failed = fleet.client.wait(evil.id, LIMIT_S)
    assert failed.state == "FAILED" and all(name in failed.reason for name in named), failed
    print(f"{failed.reason}: after {time.monotonic() - began:.1f} s")
    fleet.reach(neighbour, fleet.client.get(neighbour.id).step + 3)
    fleet.client.cancel(neighbour.id)
    ended = fleet.client.wait(neighbour.id, LIMIT_S)
    assert (ended.state, ended.recoveries) == ("CANCELLED", 0), ended
    audit(fleet, ended)


def test_a_scorer_that_kills_its_parent(own_fleet, spec_of, tmp_path):
    file, now = tmp_path / "evil.py", tmp_path / "now"
    file.write_text(SCORER)

    def spec(**more: Any) -> dict[str, Any]:
        return spec_of(steps=5000, rollout__instances=1, trainer__ranks=1, **more)

    with own_fleet("--rollout", "2", "--trainer", "2") as fleet:
        fleet.ready(*WORKERS, "reward-0")
        neighbour = fleet.submit(spec())
        evil = fleet.submit(spec(reward={"scorers": [{"name": f"{file}:score"}]}))
        check(fleet, evil, neighbour, now, f"{file}:score", "reward instances died")


@pytest.mark.parametrize(("way", "said"), [("kill", "simulator instances died"), ("segfault", "")])
def test_an_environment_that_kills_its_parent_or_segfaults(tmp_path, way, said):
    file, now = tmp_path / "evil.py", tmp_path / "now"
    file.write_text(ENVIRONMENT)

    def spec(way: str) -> dict[str, Any]:
        return {
            "name": way,
            "workflow": "embodied",
            "steps": 5000,
            "model": {"policy": {"kind": "mlp", "hidden": [8], "log_std": 0.0}},
            "environment": {
                "tasks": [f"{file}:make_cart"],
                "options": {"way": way},
                "count": 2,
                "max_episode_steps": 4,
            },
            "data": {"options": {"starts": 16}},
            "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 4},
            "rollout": {"instances": 1},
            "trainer": {"ranks": 1},
            "placement": {"mode": "collocated"},
            "export": False,
        }

    with Fleet(tmp_path / "data", "--rollout", "2", "--trainer", "2") as fleet:
        fleet.ready(*WORKERS, "simulator-0")
        neighbour, evil = fleet.submit(spec("none")), fleet.submit(spec(way))
        check(fleet, evil, neighbour, now, f"{file}:make_cart", said)
