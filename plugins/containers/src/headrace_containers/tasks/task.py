"""A coding task, whatever form it is written in: where it is solved, what is asked, and who judges it.

Knows neither a run nor a model.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace_containers.provider import DEFAULT_USER, Container, Network, Spec

RESTORED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "__pycache__", ".git"),
    *(
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        ".coveragerc",
    ),
)
"""Names of what may change how tests are run: the image's own are judged, never what an agent made of them."""
ROOT = "root"
Start = Callable[[Spec], Container]
"""Starts containers, as `Provider.start` does."""
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


class BadTask(Exception):
    """A task cannot be used: `task` is its name, `reason` what is wrong, and `fix` what to change."""

    def __init__(self, task: str, reason: str, fix: str) -> None:
        super().__init__(f"{task}: {reason}; {fix}")
        self.task, self.reason, self.fix = task, reason, fix


@dataclass(frozen=True)
class Judged:
    """What tests said. `rewards` are the numbers that they gave, by name; `said` is the end of their output."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    said: str = ""

    @property
    def reward(self) -> float:
        """The reward of the task: "reward", or the only one; 0 where the tests gave none."""
        if "reward" in self.rewards:
            return self.rewards["reward"]
        return next(iter(self.rewards.values())) if len(self.rewards) == 1 else 0.0


class Tests(Protocol):
    """Tests that judge what is in a container, which the agent has never been in."""

    def judge(self, container: Container, workdir: str) -> Judged:
        """Copies the tests in, runs them, and reads from outside what they said."""
        ...


class Solution(Protocol):
    """The oracle's answer: what solves a task."""

    def solve(self, container: Container, user: str, workdir: str) -> str:
        """Solves it in an agent's container, as the agent's user; returns the end of what it said."""
        ...


@dataclass(frozen=True)
class Health:
    """A command that succeeds once a container is ready, asked again and again for a while."""

    command: str
    every_s: float = 5.0
    within_s: float = 45.0
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Task:
    """One task. `digest` differs where anything of it does."""

    name: str
    instruction: str
    tests: Tests
    solution: Solution | None
    digest: str
    spec: Spec
    agent_s: float = 0.0
    """Seconds that its author gives an agent; 0: the author does not say."""
    shared: bool = False
    """Its tests judge the container in which the agent was, as what it started is a part of the outcome."""
    carried: tuple[str, ...] = ()
    """What the tests find of the agent's container beside the working directory."""
    restored: tuple[str, ...] = RESTORED
    judge: Spec | None = None
    """The container of its tests, where that is another one."""
    health: Health | None = None
    archive: bytes = b""
    """A tar file that is unpacked in the working directory of each new container."""

    @property
    def user(self) -> str:
        """Who solves it."""
        return self.spec.user

    @property
    def judged_in(self) -> Spec:
        """The container in which the tests run: its files are root's, until the agent's are there."""
        return replace(self.judge or replace(self.spec, network=Network()), user="root", owned=())


def digest_of(parts: Iterable[tuple[str, bytes]]) -> str:
    """One digest of named contents."""
    found = hashlib.sha256()
    for name, content in parts:
        found.update(f"{len(name.encode())}:{name}:{len(content)}:".encode())
        found.update(content)
    return found.hexdigest()


def variables(task: str, given: Mapping[str, str], key: str) -> dict[str, str]:
    """Variables with `${NAME}` and `${NAME:-DEFAULT}` read from this process's own. Raises BadTask."""
    found = {}
    for name, value in given.items():
        reference = _VARIABLE.fullmatch(value)
        if reference is None:
            found[name] = value
        elif reference[1] in os.environ or reference[2] is not None:
            found[name] = os.environ.get(reference[1], reference[2] or "")
        else:
            reason = f"{key}.{name} is {value}, and there is no such variable here"
            raise BadTask(task, reason, f"name {reference[1]} in environment.env, or write its value")
    return found


def agent_user(own: str | int | None) -> str:
    """Who solves a task: as it says, else a user without rights."""
    return DEFAULT_USER if own is None else str(own)
