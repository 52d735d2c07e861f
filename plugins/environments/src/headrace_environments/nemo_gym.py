"""Resources servers of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym), by their address, with rows of a file.

A server seeds a session for a row, answers calls of tools in it, and verifies what was said. Speaks the wire of NeMo
Gym 0.7, and needs none of its packages.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from headrace_schema.text_files import numbered_lines
from headrace_servicekit.registry import Options
from headrace_servicekit.tool_arguments import typed
from headrace_servicekit.tool_calls import Call, beside_calls
from headrace_simulator.backends.base import BackendError, Message, Tool
from headrace_simulator.backends.options import parse
from pydantic import Field, PositiveInt

from headrace_environments.openenv import ERROR, Parser
from headrace_environments.servers import Server, ServerLost, ServerOptions

KIND = "resources server of NeMo Gym"
PARAMETERS = "responses_create_params"


class NemoGymOptions(ServerOptions):
    """Options of an environment."""

    path: Path = Field(
        description="a .jsonl file of NeMo Gym's rows: responses_create_params, and what verifies"
    )
    turns: PositiveInt = Field(16, description="turns of the model, after which what was said is verified")
    parser: Parser = Field("hermes", description="form of calls")


class NemoGym:
    """Sessions with a server, one after the other, each for the row at the seed's place."""

    def __init__(self, url: str, options: NemoGymOptions) -> None:
        self._server, self._options = Server(KIND, url, options), options
        if "/verify" not in self._server.described("/openapi.json").get("paths", {}):
            raise BackendError("environment.name", f"{url} is no {KIND}: it has no /verify")
        self._rows = _rows(options.path.absolute())
        self._client: httpx.Client | None = None
        self._row: Mapping[str, Any] = {}
        self._tools: dict[str, Tool] = {}
        self._output: list[dict[str, Any]] = []
        self._turns = 0

    def reset(self, seed: int, item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Seeds a session; what is asked, and the tools of the row."""
        if self._client is not None:
            self._client.close()
        self._client = self._server.client()  # With cookies of its own: they are the session.
        self._row = self._rows[seed % len(self._rows)]
        self._output, self._turns = [], 0
        self._server.object_of(self._server.ask(self._client, "/seed_session", self._row))
        given = self._row[PARAMETERS]
        listed = [each for each in given.get("tools") or [] if each.get("type") == "function"]
        self._tools = {each["name"]: _tool(each) for each in listed}
        return _messages(given), list(self._tools.values())

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Answers the calls; a turn without any, and the last one, is verified."""
        self._turns += 1
        content, calls = beside_calls(self._options.parser, message["content"], self._tools)
        if content.strip() or not calls:
            self._output.append(_said(content))
        told = [self._called(call, at) for at, call in enumerate(calls)]
        if calls and self._turns < self._options.turns:
            return told, 0.0, False, {}
        reward = self._verified()
        return [], reward, True, {"success": reward > 0}

    def _called(self, call: Call, at: int) -> Message:
        """The answer to a call, which becomes a part of what is verified."""
        assert self._client is not None
        id = call.id or f"call{self._turns:03}{at:02}"
        name, arguments = call.name or "unknown", call.arguments
        if call.problem:
            answer = f"{ERROR}{call.problem}"
        elif name not in self._tools:
            answer = f"{ERROR}there is no tool {name!r}; tools: {', '.join(self._tools)}"
        else:
            arguments = typed(call, self._tools[name]["function"]["parameters"]).arguments
            found = self._server.ask(self._client, f"/{name}", arguments)
            answer = found.text if found.is_success else f"{ERROR}{found.status_code} {found.text}"
        written = json.dumps(arguments if arguments is not None else {})
        self._output += [
            {"type": "function_call", "call_id": id, "name": name, "arguments": written},
            {"type": "function_call_output", "call_id": id, "output": answer},
        ]
        return {"role": "tool", "content": answer, "tool_call_id": id, "name": name}

    def _verified(self) -> float:
        assert self._client is not None
        response = _response(self._row[PARAMETERS], self._output)
        answer = self._server.ask(self._client, "/verify", {**self._row, "response": response})
        found = self._server.object_of(answer)
        if found.get("mask_sample"):
            why = found.get("failure_reason") or found.get("failure_kind") or "it does not say why"
            raise ServerLost(f"{KIND} at {self._server.url} measured nothing (mask_sample): {why}")
        reward = found.get("reward")
        if not isinstance(reward, int | float):
            raise ServerLost(f"{KIND} at {self._server.url}: /verify says no reward, but {str(found)[:200]}")
        return float(reward)


def _messages(given: Mapping[str, Any]) -> list[Message]:
    """What is asked, as messages."""
    asked = given["input"]
    listed = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    system = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    return [*system, *({"role": each["role"], "content": _content(each["content"])} for each in listed)]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    own = {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "completed"}
    return {**own, "type": "message", "content": [part]}


def _response(given: Mapping[str, Any], output: list[dict[str, Any]]) -> dict[str, Any]:
    """What was said as an object of the Responses API."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": str(given.get("model") or "policy"),
        "output": output,
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools") or [],
        "status": "completed",
    }


def _tool(each: Mapping[str, Any]) -> Tool:
    described = {"name": each["name"], "description": each.get("description") or ""}
    return {"type": "function", "function": {**described, "parameters": each.get("parameters") or {}}}


@lru_cache(maxsize=4)
def _rows(path: Path) -> list[Mapping[str, Any]]:
    """Read once in a process, as its conversations share them."""
    key = "options_json.path"
    if not path.is_file():
        raise BackendError(key, f"there is no file {path}; paths start where the service does")
    found = list[Mapping[str, Any]]()
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
            _messages(row[PARAMETERS])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{path}:{number} is no row with {PARAMETERS}.input ({type(error).__name__}: {error})"
            raise BackendError(key, reason) from error
        found.append(row)
    if not found:
        raise BackendError(key, f"{path} is empty")
    return found


class Environments:
    """Environments by the address of their server."""

    def environments(self) -> list[str]:
        """None that could be listed."""
        return []

    def converse(self, name: str, options: Mapping[str, Any]) -> NemoGym:
        """Asks a server what it is, and reads the rows."""
        return NemoGym(name, parse(NemoGymOptions, options))


def build(options: Options) -> Environments:
    """The backend."""
    return Environments()
