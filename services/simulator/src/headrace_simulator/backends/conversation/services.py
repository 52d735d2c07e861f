"""Tools of MCP servers: processes that are started here, speak over stdin and stdout, and are asked side by side.

One process of a server serves all conversations of this child process; one that ends is started again at the next call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from headrace_servicekit.process import spawn
from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat

from headrace_simulator.backends.conversation.calls import ServiceLost, waited

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

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

    def begin(self, arguments: Any, left_s: float) -> Callable[[float], str]:
        """Asks the server at once; see `calls.AnyTool`."""
        return self._service.begin(self.name, arguments)


class Service:
    """A server's process and the connection to it."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._client: Any = None
        self._ended = ""
        """Why the connection is over; empty while it is not."""

    def tools(self) -> list[ServiceTool]:
        """The tools that it offers; ServiceLost where it cannot be asked, ValueError where one is missing."""
        listed = self._connected()
        wanted = self._options.tools or list(listed)
        if missing := [name for name in wanted if name not in listed]:
            raise ValueError(
                f"{self._options.command[0]} has no tool {missing[0]!r}; tools: {', '.join(listed)}"
            )
        return [ServiceTool(self, name, listed[name]) for name in wanted]

    def begin(self, name: str, arguments: Any) -> Callable[[float], str]:
        """Asks for a call; returns what waits for it. ServiceLost where the server does not start."""
        if not isinstance(arguments, dict):
            raise ValueError("arguments: an object is wanted")
        self._connected()
        future = asyncio.run_coroutine_threadsafe(self._call(name, arguments), _loop())
        return lambda left_s: self._result(future, left_s)

    def _result(self, future: Future[str], left_s: float) -> str:
        try:
            return waited(future, left_s)
        except TimeoutError:
            future.cancel()
            if self._ended:
                raise ServiceLost(self._ended) from None
            raise

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            await asyncio.sleep(0)  # where the connection ended, that is noted by now
            if self._ended:
                raise ServiceLost(self._ended) from error
            raise ValueError(error.error.message) from error
        except Exception as error:
            if self._ended:
                raise ServiceLost(self._ended) from error
            raise
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        if result.is_error:
            raise ValueError("\n".join(texts))
        return "\n".join(texts)

    def _connected(self) -> dict[str, Mapping[str, Any]]:
        """Schemas by name, of a server that runs; starts one where none does."""
        if self._client is None or self._ended:
            self._ended = ""
            told: Future[dict[str, Mapping[str, Any]]] = Future()
            asyncio.run_coroutine_threadsafe(self._serve(told), _loop())
            shown = " ".join(self._options.command)
            try:
                self._listed = told.result(self._options.start_timeout_s)
            except TimeoutError:
                limit = self._options.start_timeout_s
                raise ServiceLost(f"the MCP server {shown} told no tools within {limit:g} s") from None
            except Exception as error:
                raise ServiceLost(f"the MCP server {shown} does not start: {self._ended or error}") from error
        return self._listed

    async def _serve(self, told: Future[dict[str, Mapping[str, Any]]]) -> None:
        """Holds the connection until it ends."""
        from mcp import Client

        over = asyncio.Event()
        try:
            async with Client(self._transport(over)) as client:
                listed: dict[str, Mapping[str, Any]] = {}
                cursor: str | None = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    listed |= {tool.name: _schema(tool) for tool in page.tools}
                    if not (cursor := page.next_cursor):
                        break
                self._client = client
                told.set_result(listed)
                await over.wait()
        except BaseException as error:  # noqa: BLE001  # told where it is waited for
            self._ended = self._ended or f"{type(error).__name__}: {error}"
            if not told.done():
                told.set_exception(ServiceLost(self._ended))
        self._ended = self._ended or "its connection ended"

    @asynccontextmanager
    async def _transport(self, over: asyncio.Event) -> AsyncIterator[TransportStreams]:
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
                        self._ended = self._ended or f"its process ended with {await _status(process)}"
                    except ValueError:
                        self._ended = f"it sent a message of more than {MOST_BYTES} bytes"
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
