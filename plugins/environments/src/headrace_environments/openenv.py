"""Environments behind servers of OpenEnv (https://github.com/huggingface/OpenEnv), by their address.

A connection is an environment: it is held over the conversations of one place in a pool. Speaks the wire of OpenEnv
0.10, and needs none of its packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from headrace_servicekit.registry import Options
from headrace_servicekit.tool_arguments import typed
from headrace_servicekit.tool_calls import Call, beside_calls
from headrace_simulator.backends.base import BackendError, Message, Tool
from headrace_simulator.backends.options import parse
from pydantic import Field
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from headrace_environments.servers import Server, ServerLost, ServerOptions

KIND = "server of OpenEnv"
OF_TOOLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of an action's schema by which a server says that its actions are calls of tools."""
MOST_BYTES = 8 << 20
"""Of one message of a server."""
ERROR = "error: "
Parser = Literal["hermes", "json", "llama3", "mistral", "qwen3_coder", "glm"]


class OpenEnvOptions(ServerOptions):
    """Options of an environment."""

    reset: dict[str, Any] = Field(default_factory=dict, description="what reset is given, beside the seed")
    item: list[str] = Field(default_factory=list, description="keys of the data item that reset is given too")
    show: list[str] = Field(
        default_factory=list,
        description="keys of an observation that the model reads; a single one as it is, several as JSON; none: all",
    )
    system: str = Field("", description="system message that the conversation begins with")
    parser: Parser = Field(
        "hermes", description="form of calls, where the server's actions are calls of tools"
    )


class Failed(ServerLost):
    """An environment that failed, behind a server that goes on."""


class Wrong(Exception):
    """What the model did wrong: it is told."""


class OpenEnv:
    """One environment of a server, and its conversations one after the other."""

    def __init__(self, server: Server, options: OpenEnvOptions) -> None:
        self._server, self._options = server, options
        schema = self._server.described("/schema").get("action")
        if not isinstance(schema, dict):
            raise BackendError(server.key, f"{server.name} is no {KIND}: its /schema has no action")
        self._action = {
            name: each
            for name, each in schema.get("properties", {}).items()
            if name in schema.get("required", ())
        }
        self._connection: ClientConnection | None = None
        self._tools: dict[str, Tool] = {}
        self._turns = 0
        self._open()
        if schema.get("title") in OF_TOOLS:
            listed = self._asked("step", {"type": "list_tools"})["observation"].get("tools", [])
            self._tools = {each["name"]: _tool(each) for each in listed}

    def reset(
        self, seed: int, item: Mapping[str, Any]
    ) -> Sequence[Message] | tuple[Sequence[Message], Sequence[Tool]]:
        """An episode that follows from the seed: its first observation."""
        options, self._turns = self._options, 0
        if missing := [key for key in options.item if key not in item]:
            raise ServerLost(f"the data item has no {missing[0]!r}, which environment.options.item names")
        self._open()
        found = self._asked(
            "reset", {"seed": seed, **options.reset, **{key: item[key] for key in options.item}}
        )
        if found.get("done"):
            raise ServerLost(f"{KIND} at {self._server.name}: an episode is over as it begins")
        system = [{"role": "system", "content": options.system}] if options.system else []
        messages = [*system, {"role": "user", "content": self._shown(found["observation"])}]
        return messages, list(self._tools.values())

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """Acts as the model says. What is no action is told to it; in an environment of tools a turn without a call
        is the last one.
        """
        self._turns += 1
        if self._tools:
            return self._called(message["content"])
        try:
            found = self._asked("step", self._action_of(message["content"]))
        except Wrong as wrong:
            return [{"role": "user", "content": f"{ERROR}{wrong}"}], 0.0, False
        return _ended(found, [{"role": "user", "content": self._shown(found["observation"])}])

    def _called(self, text: str) -> tuple[Sequence[Message], float, bool]:
        _, calls = beside_calls(self._options.parser, text, self._tools)
        told, reward, done = list[Message](), 0.0, False
        for at, call in enumerate(calls):
            try:
                if done:
                    raise Wrong("the episode is over")
                found = self._asked("step", self._call_of(call))
                answer, reward = _answer(found["observation"]), reward + float(found.get("reward") or 0.0)
                done = bool(found.get("done"))
            except Wrong as wrong:
                answer = f"{ERROR}{wrong}"
            id = call.id or f"call{self._turns:03}{at:02}"
            told.append(
                {"role": "tool", "content": answer, "tool_call_id": id, "name": call.name or "unknown"}
            )
        return told, reward, done or not calls

    def _call_of(self, call: Call) -> dict[str, Any]:
        if call.problem:
            raise Wrong(call.problem)
        if call.name not in self._tools:
            raise Wrong(f"there is no tool {call.name!r}; tools: {', '.join(self._tools)}")
        arguments = typed(call, self._tools[call.name]["function"]["parameters"]).arguments
        if not isinstance(arguments, dict):
            raise Wrong(f"{call.name}: its arguments are no object")
        return {"type": "call_tool", "tool_name": call.name, "arguments": arguments}

    def _action_of(self, text: str) -> dict[str, Any]:
        """What the model says as an action: an object, or the one field that an action needs. Raises Wrong."""
        text = text.strip()
        if text.startswith("```") and text.endswith("```"):
            text = "\n".join(text.splitlines()[1:-1])
        if len(self._action) == 1:
            ((name, schema),) = self._action.items()
            if schema.get("type") == "string":
                return {name: text}
        try:
            found = json.loads(text)
        except ValueError:
            found = text
        if isinstance(found, dict):
            return found
        if len(self._action) == 1:
            return dict.fromkeys(self._action, found)
        raise Wrong(f"an action is a JSON object with {', '.join(self._action) or 'its fields'}")

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """An observation as the model reads it."""
        own = [key for key in observation if key != "metadata"]
        keys = self._options.show or own or [*observation]
        if missing := [key for key in keys if key not in observation]:
            has = ", ".join(observation)
            raise ServerLost(f"environment.options.show: an observation has no {missing[0]!r}; it has {has}")
        shown = {key: observation[key] for key in keys}
        return _text(shown[keys[0]] if len(keys) == 1 else shown)

    def _open(self) -> None:
        """Connects, where the connection before is over."""
        if self._connection is not None:
            return
        address = self._server.url.replace("http", "ws", 1) + "/ws"
        options = self._options
        try:
            self._connection = connect(
                address,
                sock=self._server.dial(),
                additional_headers=options.headers,
                open_timeout=options.request_timeout_s,
                max_size=MOST_BYTES,
            )
        except (OSError, WebSocketException) as error:
            raise self._gone(error) from error
        with suppress(Failed):  # One that has no room for another environment says so in place of its state.
            self._asked("state", None)

    def _asked(self, kind: str, data: Any) -> dict[str, Any]:
        """What the server answers. Raises Wrong for what it says is wrong with an action, ServerLost for the rest."""
        assert self._connection is not None
        body = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with suppress(ConnectionClosed):  # Why it did so may lie here, unread.
                self._connection.send(json.dumps(body))
            found = json.loads(self._connection.recv(self._options.request_timeout_s))
        except (OSError, WebSocketException, ValueError) as error:
            raise self._gone(error) from error
        told = found.get("data") if isinstance(found, dict) else None
        if not isinstance(told, dict):
            raise self._gone(ValueError(f"it answers {str(found)[:200]}"))
        if found.get("type") != "error":
            return told
        code, said = told.get("code"), str(told.get("message"))
        if code == "VALIDATION_ERROR" and kind == "step":
            raise Wrong(_wrong(told))
        if kind != "state":
            self.close()  # The conversation is made anew, with a connection of its own.
        if code == "CAPACITY_REACHED":
            self.close()
            fix = "raise max_concurrent_envs of the server, or lower environment.count"
            raise BackendError(
                "environment.count", f"{self._server.name} has no room for another: {said}; {fix}"
            )
        raise Failed(f"{KIND} at {self._server.name}: {kind} failed with {code}: {said}")

    def close(self) -> None:
        """Ends its connection; the next episode has another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _gone(self, error: Exception) -> ServerLost:
        self.close()
        return ServerLost(f"{KIND} at {self._server.name} is gone: {error or type(error).__name__}")


def _ended(found: Mapping[str, Any], messages: list[Message]) -> tuple[Sequence[Message], float, bool]:
    done = bool(found.get("done"))
    return ([] if done else messages), float(found.get("reward") or 0.0), done


def _tool(each: Mapping[str, Any]) -> Tool:
    described = {"name": each["name"], "description": each.get("description") or ""}
    return {"type": "function", "function": {**described, "parameters": each.get("input_schema") or {}}}


def _answer(observation: Mapping[str, Any]) -> str:
    """What a tool answered, or what was wrong with the call."""
    if error := observation.get("error"):
        return f"{ERROR}{error.get('message') if isinstance(error, dict) else error}"
    result = observation.get("result", observation)
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    elif isinstance(result, dict) and isinstance(result.get("content"), list):
        result = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in result["content"])
    return _text(result)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _wrong(told: Mapping[str, Any]) -> str:
    errors = told.get("errors") or [{}]
    where = ".".join(map(str, errors[0].get("loc", ())))
    return f"{where}: {errors[0].get('msg', told.get('message'))}" if where else str(told.get("message"))


class Environments:
    """Environments by the address of their server."""

    def environments(self) -> list[str]:
        """None that could be listed."""
        return []

    def converse(self, name: str, options: Mapping[str, Any]) -> OpenEnv:
        """Connects with a server."""
        if "image" in options:
            fix = "servers by their image are a task of containers: backend: container, tasks: [openenv]"
            raise BackendError("options_json.image", f"{KIND} is named by its address here; {fix}")
        try:
            parsed = parse(OpenEnvOptions, options)
            return OpenEnv(Server(KIND, name, parsed), parsed)
        except ServerLost as lost:
            raise BackendError("environment.name", str(lost)) from lost


def build(options: Options) -> Environments:
    """The backend."""
    return Environments()
