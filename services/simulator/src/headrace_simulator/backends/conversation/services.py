"""Tools of MCP servers: processes that are started here, speak over stdin and stdout, and are asked side by side.

One process of a server serves all conversations of this child process; one that ends is started again at the next call.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from headrace_servicekit.causes import raised
from headrace_servicekit.process import spawn
from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat

from headrace_simulator.backends.conversation.calls import Content, ServiceLost, waited

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

TEXTS = ("application/json", "application/xml", "application/yaml", "application/javascript")
"""Types of resources, beside text/…, that are texts."""
_UNREAD = "which no model here reads: let the tool answer with text or images"
MOST_BYTES = 8 << 20
"""Of one message of a server."""


class ServerOptions(Options):
    """One MCP server."""

    command: list[str] = Field(
        min_length=1, description="command that starts it; it speaks MCP over stdin and stdout"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="environment variables beside this service's"
    )
    tools: list[str] = Field(default_factory=list, description="the tools that the model gets; left out: all")
    start_timeout_s: PositiveFloat = Field(30.0, description="seconds until it has told its tools")


class ServiceTool:
    """One tool of a server."""

    def __init__(self, service: Service, name: str, schema: Mapping[str, Any]) -> None:
        self.name, self.schema, self._service = name, schema, service

    def begin(self, arguments: Any, left_s: float) -> Callable[[float], Content]:
        """Asks the server at once; see `calls.AnyTool`."""
        return self._service.begin(self.name, arguments)


@dataclass
class Connection:
    """With one process of a server."""

    client: Any = None
    tools: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ended: str = ""
    """Why it is over; empty while it is not."""


class Service:
    """A server: its process and the connection to it, and others after them where they end."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._connection = Connection(ended="it was not started")

    def tools(self) -> list[ServiceTool]:
        """The tools that it offers; ServiceLost where it cannot be asked, ValueError where one is missing."""
        listed = self._connected().tools
        wanted = self._options.tools or list(listed)
        if missing := [name for name in wanted if name not in listed]:
            raise ValueError(
                f"{self._options.command[0]} has no tool {missing[0]!r}; tools: {', '.join(listed)}"
            )
        return [ServiceTool(self, name, listed[name]) for name in wanted]

    def begin(self, name: str, arguments: Any) -> Callable[[float], Content]:
        """Asks for a call; returns what waits for it. ServiceLost where the server does not start."""
        if not isinstance(arguments, dict):
            raise ValueError("arguments: an object is wanted")
        connection = self._connected()
        future = asyncio.run_coroutine_threadsafe(_called(connection, name, arguments), _loop())

        def answer(left_s: float) -> Content:
            try:
                return waited(future, left_s)
            except TimeoutError:
                future.cancel()
                if connection.ended:
                    raise ServiceLost(connection.ended) from None
                raise

        return answer

    def _connected(self) -> Connection:
        """The connection with a server that runs; starts one where none does."""
        if self._connection.ended:
            self._connection = connection = Connection()
            told: Future[None] = Future()
            serving = asyncio.run_coroutine_threadsafe(self._serve(connection, told), _loop())
            shown = " ".join(self._options.command)
            try:
                told.result(self._options.start_timeout_s)
            except TimeoutError:
                serving.cancel()
                limit = self._options.start_timeout_s
                connection.ended = f"the MCP server {shown} told no tools within {limit:g} s"
                raise ServiceLost(connection.ended) from None
            except ServiceLost as error:
                raise ServiceLost(f"the MCP server {shown} does not start: {error}") from error
        return self._connection

    async def _serve(self, connection: Connection, told: Future[None]) -> None:
        """Holds the connection until it ends."""
        from mcp import Client

        over = asyncio.Event()
        try:
            async with Client(self._transport(connection, over)) as client:
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    connection.tools |= {tool.name: _schema(tool) for tool in page.tools}
                    if not (cursor := page.next_cursor):
                        break
                connection.client = client
                told.set_result(None)
                await over.wait()
        except BaseException as error:  # noqa: BLE001  # told where it is waited for
            connection.ended = connection.ended or raised(error)
        connection.ended = connection.ended or "its connection ended"
        if not told.done():
            told.set_exception(ServiceLost(connection.ended))

    @asynccontextmanager
    async def _transport(
        self, connection: Connection, over: asyncio.Event
    ) -> AsyncIterator[TransportStreams]:
        """The process's pipes as the streams of messages that `mcp` wants; no message is longer than `MOST_BYTES`."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", spawn.__file__, str(os.getpid()), *self._options.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._options.env},
            limit=MOST_BYTES,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        heard, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, said = anyio.create_memory_object_stream[SessionMessage](0)

        async def listen() -> None:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async with heard:
                    try:
                        while line := await stdout.readline():
                            try:
                                parsed = jsonrpc_message_adapter.validate_json(line, by_name=False)
                            except ValueError:
                                continue  # what a server prints beside its messages
                            await heard.send(SessionMessage(parsed))
                        connection.ended = (
                            connection.ended or f"its process ended with {await _status(process)}"
                        )
                    except ValueError:
                        connection.ended = f"it sent a message of more than {MOST_BYTES} bytes"
            over.set()

        async def speak() -> None:
            with suppress(ConnectionError, anyio.ClosedResourceError):
                async for message in said:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode() + b"\n")
                    await stdin.drain()

        tasks = [asyncio.create_task(listen()), asyncio.create_task(speak())]
        try:
            yield incoming, outgoing
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for task in tasks:
                task.cancel()
            for stream in (heard, incoming, outgoing, said):
                stream.close()
            await process.wait()


async def _called(connection: Connection, name: str, arguments: dict[str, Any]) -> Content:
    from mcp import MCPError

    try:
        result = await connection.client.call_tool(name, arguments)
    except Exception as error:
        await asyncio.sleep(0)  # where the connection ended, that is noted by now
        if connection.ended:
            raise ServiceLost(connection.ended) from error
        if isinstance(error, MCPError):
            raise ValueError(error.error.message) from error
        raise
    parts = [_part(block) for block in result.content]
    texts = [part.get("text", "[image]") for part in parts]
    if result.structured_content is not None and not _told(result.structured_content, "\n".join(texts)):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        parts.append({"type": "text", "text": texts[-1]})
    if result.is_error:
        raise ValueError("\n".join(texts))
    return parts if any(part["type"] == "image" for part in parts) else "\n".join(texts)


def _part(block: Any) -> dict[str, Any]:
    """A block of an answer as the text, or the image, that it holds. Raises ValueError for what a model cannot read."""
    if block.type == "resource":
        held, kind = block.resource, (block.resource.mime_type or "").partition(";")[0]
        if hasattr(held, "text"):
            return {"type": "text", "text": held.text}
        data = base64.b64decode(held.blob)
        if kind.startswith("image/"):
            return {"type": "image", "image": data}
        if kind.startswith("text/") or kind in TEXTS:
            return {"type": "text", "text": data.decode(errors="replace")}
        raise ValueError(f"its answer has the resource {held.uri} of type {kind or 'unknown'}, {_UNREAD}")
    if block.type == "text":
        return {"type": "text", "text": block.text}
    if block.type == "image":
        return {"type": "image", "image": base64.b64decode(block.data)}
    if block.type == "resource_link":
        told = block.model_dump(mode="json", include={"uri", "name", "title", "description", "mime_type"})
        return {
            "type": "text",
            "text": json.dumps({key: each for key, each in told.items() if each}, ensure_ascii=False),
        }
    raise ValueError(f"its answer has {block.type} ({getattr(block, 'mime_type', None)}), {_UNREAD}")


def _told(structured: Any, text: str) -> bool:
    """Whether a text has all that is in a structured answer, as servers write it beside that."""
    if isinstance(structured, dict):
        return all(_told(each, text) for each in structured.values()) and (bool(structured) or "{}" in text)
    if isinstance(structured, list):
        return all(_told(each, text) for each in structured) and (bool(structured) or "[]" in text)
    shown = structured if isinstance(structured, str) else json.dumps(structured)
    return shown in text or json.dumps(structured, ensure_ascii=False) in text or str(structured) in text


async def _status(process: asyncio.subprocess.Process) -> str:
    try:
        async with asyncio.timeout(1.0):
            return f"exit code {await process.wait()}"
    except TimeoutError:
        return "its output closed"


def _schema(tool: Any) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


_services: dict[str, Service] = {}


def service_of(options: ServerOptions) -> Service:
    """The one service of these options in this process."""
    return _services.setdefault(options.model_dump_json(), Service(options))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of all connections, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop
