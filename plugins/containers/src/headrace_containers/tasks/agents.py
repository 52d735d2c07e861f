"""Agents that others wrote, on coding tasks: a command in the task's container, or on this host against it.

The model that the command asks is the run's policy, behind its session's endpoint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from headrace_servicekit.contained.network import ENDPOINT_VARIABLE
from headrace_servicekit.registry import Options
from headrace_simulator.backends.agent import ForkedAgent
from headrace_simulator.backends.base import Agent, BackendError
from headrace_simulator.backends.options import parse
from typing_extensions import override

from headrace_containers.provider import ENDPOINT_PORT, Container, ContainerLost, EngineLost
from headrace_containers.tasks.coding import RIGHT, shortened
from headrace_containers.tasks.options import AgentOptions, Tasks
from headrace_containers.tasks.shim import Shim
from headrace_containers.tasks.task import Start, Task
from headrace_containers.tasks.verifying import begin, judge, settled

SECONDS = 300.0
_ADDRESSES = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
_GIVEN = (*_ADDRESSES, "OPENAI_API_KEY", "HEADRACE_SESSION")
_NOT_RUN = (126, 127)
_MOST_SAID = 2000


class TaskAgent(ForkedAgent):
    """Solves a task by a command; its tests are run once the command has ended, however it did."""

    def __init__(self, options: AgentOptions, start: Start) -> None:
        super().__init__()
        self._options, self._start, self._tasks = options, start, Tasks(options)

    @override
    def called(self, seed: int, item: Mapping[str, Any]) -> Mapping[str, Any]:
        options, start = self._options, self._start
        given: Mapping[str, Any] = item.get("metadata") or {}
        task = settled(start, self._tasks.named(str(given.get("name", "")), str(given.get("digest", ""))))
        seconds = options.seconds or task.agent_s or SECONDS
        spec = task.spec
        if options.runs == "container":
            endpoint = os.environ[ENDPOINT_VARIABLE]
            spec = replace(spec, network=replace(spec.network, endpoint=endpoint))
        container = begin(start, task, spec)
        try:
            run = self._in_container if options.runs == "container" else self._on_host
            code, said = run(container, task, seconds)
        except EngineLost:
            raise
        except ContainerLost as error:
            code, said = 0, f"the container was lost: {error}"
        if code in _NOT_RUN:
            container.close()
            raise RuntimeError(f"{options.command[0]} cannot be run: {said.strip()[-300:]}")
        reward = judge(start, task, container).reward
        return {"reward": reward, "success": reward >= RIGHT}

    def _in_container(self, container: Container, task: Task, seconds: float) -> tuple[int, str]:
        variables = {name: os.environ[name] for name in _GIVEN if name in os.environ}
        for name in _ADDRESSES:
            if name in variables:
                inside = urlsplit(variables[name])._replace(
                    scheme="http", netloc=f"127.0.0.1:{ENDPOINT_PORT}"
                )
                variables[name] = urlunsplit(inside)
        ran = container.exec(
            filled(self._options.command, task),
            env={**variables, **_loopback(), **_own(task), **self._options.variables},
            timeout_s=seconds,
        )
        return ran.exit_code, shortened((ran.stdout + ran.stderr).decode(errors="replace"), _MOST_SAID)

    def _on_host(self, container: Container, task: Task, seconds: float) -> tuple[int, str]:
        with Shim(container, task.spec.workdir) as shim:
            variables = {**os.environ, **shim.variables, **_own(task), **self._options.variables}
            try:
                ran = subprocess.run(
                    filled(self._options.command, task),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=shim.folder,
                    timeout=seconds,
                )
            except FileNotFoundError as error:
                return _NOT_RUN[1], str(error)
            except subprocess.TimeoutExpired as error:
                return 0, (error.output or b"").decode(errors="replace")
        return ran.returncode, shortened(ran.stdout.decode(errors="replace"), _MOST_SAID)


def filled(command: list[str], task: Task) -> list[str]:
    """A command with what its task says in the places of {instruction}, {task} and {workdir}.

    A place is all of an argument, or a part of it.
    """
    texts = {"{instruction}": task.instruction, "{task}": task.name, "{workdir}": task.spec.workdir}
    found = []
    for each in command:
        whole = texts.get(each)
        if whole is None:
            whole = each.replace("{workdir}", task.spec.workdir).replace("{task}", task.name)
        found.append(whole)
    return found


def _own(task: Task) -> dict[str, str]:
    return {"HEADRACE_INSTRUCTION": task.instruction, "HEADRACE_TASK": task.name}


def _loopback() -> dict[str, str]:
    return {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


class TaskAgents:
    """The backend `container_agent`."""

    def environments(self) -> list[str]:
        """What an agent may be here."""
        return ["command"]

    def agent(self, name: str, options: Mapping[str, Any]) -> Agent:
        """The agent of a run; see `AgentBackend`."""
        chosen = parse(AgentOptions, options)
        if chosen.runs == "host" and shutil.which(chosen.command[0]) is None:
            reason = f"there is no program {chosen.command[0]!r} on the simulator's host that can be run"
            raise BackendError("options_json.command", f"{reason}; name one, or set runs: container")
        return TaskAgent(chosen, chosen.source.start)


def build(options: Options) -> TaskAgents:
    """The backend."""
    return TaskAgents()
