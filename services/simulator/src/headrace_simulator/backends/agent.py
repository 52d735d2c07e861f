"""Agents: a user's function in a fork of this process, or a command.

Runs in child processes only.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from headrace_servicekit.process import spawn
from headrace_servicekit.registry import Options
from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from headrace_simulator.backends.base import Agent, BackendError
from headrace_simulator.backends.options import parse
from headrace_simulator.backends.user_file import is_user_environment, load_factory
from headrace_simulator.child.episodes import Raised, call

# A client that a file makes as it is imported needs some address and key; the fork imports the file anew.
_NONE_YET = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none-yet"}

_LAST_WORDS_S, _MOST_WORDS = 1.0, 500
"""How long a program's standard error is read once it has ended, and how much of its last line is told."""
_MOST_BYTES = 1 << 16
"""Of what a fork says of itself: as much as a pipe holds, so that nobody has to read meanwhile."""


class AgentOptions(BaseModel):
    """Options of an agent; without a command its name is path/to/file.py:function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[str] = []


class ForkedAgent(ABC):
    """Python code that is called in a fork of this process: what it imports is imported once."""

    folder = ""
    """Where the modules are that each fork imports anew; empty: none."""

    def __init__(self) -> None:
        self._reader = -1
        os.environ.update(_NONE_YET)

    @abstractmethod
    def called(self, seed: int, item: Mapping[str, Any]) -> Any:
        """Plays, in the fork; what it returns, or awaits, is the reward."""

    def run(self, seed: int, item: Mapping[str, Any], variables: Mapping[str, str]) -> int:
        """Forks; the function runs there."""
        self._close()
        self._reader, writer = os.pipe()
        here, process = os.getpid(), os.fork()
        if process == 0:
            self._be_agent(here, writer, seed, item, variables)
        os.close(writer)
        return process

    def result(self) -> Mapping[str, Any]:
        """What the function returned, or what it raised as `error`; nothing where its process was ended."""
        os.set_blocking(self._reader, False)  # a process that the agent left behind may hold the other end
        try:
            text = os.read(self._reader, _MOST_BYTES)
        except BlockingIOError:
            text = b""
        self._close()
        found: dict[str, Any] = json.loads(text or b"{}")
        # What a client imports at its first request, hundreds of modules, the next agents have from here.
        for name in found.pop("imported", ()):
            with suppress(Exception):
                importlib.import_module(name)
        return found

    def _close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def _be_agent(
        self, parent: int, writer: int, seed: int, item: Mapping[str, Any], variables: Mapping[str, str]
    ) -> NoReturn:
        status = 1
        try:
            spawn.die_with_parent(parent)
            os.setsid()
            os.environ.update(variables)
            self._forget_neighbours()
            before = set(sys.modules)
            found = _result_of(lambda: _awaited(self.called(seed, item)))
            self._forget_neighbours()
            imported = [name for name in sys.modules if name not in before]
            text = json.dumps({**found, "imported": imported}).encode()
            os.write(writer, text if len(text) <= _MOST_BYTES else json.dumps(found).encode())
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)

    def _forget_neighbours(self) -> None:
        """Of the file and those beside it, which are imported anew."""
        for name, module in list(sys.modules.items()):
            if self.folder and os.path.dirname(getattr(module, "__file__", None) or "") == self.folder:
                del sys.modules[name]


class PythonAgent(ForkedAgent):
    """A function; its file, and those beside it, are imported anew each time."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self.folder = name, str(Path(name.rpartition(":")[0]).absolute().parent)
        load_factory(name, "agent")

    @override
    def called(self, seed: int, item: Mapping[str, Any]) -> Any:
        return load_factory(self._name, "agent")(seed, item)


class CommandAgent:
    """A program. Its exit code says whether it went well, and its reward is posted to the endpoint."""

    def __init__(self, command: list[str]) -> None:
        if not shutil.which(command[0]):
            raise BackendError("options_json.command", f"there is no program {command[0]!r} that can be run")
        self._command = command
        self._last_words, self._relay = "", threading.Thread()

    def run(self, seed: int, item: Mapping[str, Any], variables: Mapping[str, str]) -> int:
        """Starts it with {seed, item} at its standard input."""
        given = os.memfd_create("item")
        os.write(given, json.dumps({"seed": seed, "item": item}).encode() + b"\n")
        os.lseek(given, 0, os.SEEK_SET)
        try:
            started = subprocess.Popen(
                [sys.executable, "-I", "-S", spawn.__file__, str(os.getpid()), *self._command],
                stdin=given,
                stderr=subprocess.PIPE,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        finally:
            os.close(given)
        started.returncode = 0  # whoever asked waits for the process, not this object
        self._last_words = ""
        self._relay = threading.Thread(target=self._tell, args=(started.stderr,), daemon=True)
        self._relay.start()
        return started.pid

    def _tell(self, errors: IO[bytes]) -> None:
        """Passes what the program writes to its standard error to this process's own."""
        with errors:
            for line in iter(lambda: errors.readline(_MOST_BYTES), b""):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
                self._last_words = line.decode(errors="replace").strip() or self._last_words

    def result(self) -> Mapping[str, Any]:
        """The last line that it wrote to its standard error; the exit code says whether it failed."""
        self._relay.join(_LAST_WORDS_S)
        return {"last_words": self._last_words[:_MOST_WORDS]}


class Agents:
    """Agents by path/to/file.py:function, or as a command by the option of that name."""

    def environments(self) -> list[str]:
        """What an agent may be beside a file: all are users' own."""
        return ["command"]

    def agent(self, name: str, options: Mapping[str, Any]) -> Agent:
        """The agent, whose file has been imported once."""
        chosen = parse(AgentOptions, options)
        if chosen.command:
            return CommandAgent(chosen.command)
        if not is_user_environment(name):
            raise BackendError(
                "environment.name",
                f"{name} is no agent; give path/to/file.py:function, or a command",
            )
        return PythonAgent(name)


def build(options: Options) -> Agents:
    """The backend."""
    return Agents()


def _awaited(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def _result_of(function: Any) -> dict[str, Any]:
    """What an agent returned as JSON: reward, success and figures, or its error."""
    try:
        found = call(function)
    except (Raised, BackendError) as error:
        return {"error": f"raised {error}"}
    given = dict(found) if isinstance(found, Mapping) else {"reward": found}
    reward, success, figures = (given.pop(key, None) for key in ("reward", "success", "figures"))
    if given:
        return {
            "error": f"returned the keys {', '.join(map(str, given))}; return a number, or reward, success and figures"
        }
    more = {} if figures is None else {"figures": figures}
    if reward is None:
        return more | ({"success": success} if isinstance(success, bool) else {})
    try:
        value = float(reward)
    except (TypeError, ValueError):
        return {
            "error": f"returned {str(reward)[:80]!r} ({type(reward).__name__}); return a number as its reward"
        }
    if not math.isfinite(value):
        return {"error": f"returned a reward of {value}, which is not finite"}
    return {"reward": value, **more, **({"success": bool(success)} if success is not None else {})}
