"""The agents of one environment inside its child: one process a sample, waited for, and ended with all that it started.

Agents are other people's programs. Each is given its endpoint, its key and its item, and nothing of this service.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.process.spawn import descendants
from headrace_servicekit.process.worker import exit_description

from headrace_simulator.backends.base import Agent
from headrace_simulator.child.episodes import Raised, call

_END_S = 5.0


class Agents:
    """An agent and its process, if one runs."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._process = agent, 0

    def operate(
        self, operation: simulator_pb2.EnvironmentOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        """Runs a valid operation and writes how it went into the outcome; Raised where the agent failed."""
        if operation.HasField("reset"):
            self._start(operation.reset)
        elif not operation.HasField("await_agent"):
            raise Raised("a turn, and an agent takes none: it speaks with the policy by itself")
        elif operation.await_agent.kill:
            self._end()
            outcome.terminated = True
        else:
            self._await(operation.await_agent.wait.ToNanoseconds() / 1e9, outcome)

    def _start(self, reset: simulator_pb2.ResetOperation) -> None:
        self._end()
        given = json.loads(reset.options_json or "{}")
        missing = {"item", "base_url", "api_key", "session"} - set(given)
        if missing:
            raise Raised(
                f"a start without {', '.join(sorted(missing))}; the rollout gives an agent's endpoint"
            )
        self._process = call(lambda: self._agent.run(reset.seed, given["item"], _variables(given)))

    def _await(self, wait_s: float, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        if not self._process:
            raise Raised("no agent that could be waited for: start one first")
        if not _ended_within(self._process, wait_s):
            return
        _, status = os.waitpid(self._process, 0)
        self._process = 0
        self._end()
        found = call(self._agent.result)
        if error := found.get("error"):
            raise Raised(f"an error: the agent {error}")
        if code := os.waitstatus_to_exitcode(status):
            raise Raised(f"an error: the agent's process {exit_description(code)}")
        outcome.terminated, outcome.executed_length = True, 1
        outcome.reward = found.get("reward", 0.0)
        outcome.success, outcome.success_reported = bool(found.get("success")), "success" in found
        outcome.info_json = json.dumps({"rewarded": "reward" in found})

    def _end(self) -> None:
        """Kills the agent and whatever it has started: this process is the parent of all that it left behind."""
        self._process, until = 0, time.monotonic() + _END_S
        while (left := descendants([os.getpid()])[1:]) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.001)


def _ended_within(process: int, wait_s: float) -> bool:
    watched = os.pidfd_open(process)
    try:
        ready, _, _ = select.select([watched], [], [], wait_s)
    finally:
        os.close(watched)
    return bool(ready)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """What an agent finds its endpoint by, under the names that clients read."""
    around = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), urlsplit(given["base_url"]).hostname)))
    return {
        "OPENAI_BASE_URL": given["base_url"],
        "OPENAI_API_BASE": given["base_url"],
        "OPENAI_API_KEY": given["api_key"],
        "HEADRACE_SESSION": given["session"],
        "NO_PROXY": around,
        "no_proxy": around,
    }
