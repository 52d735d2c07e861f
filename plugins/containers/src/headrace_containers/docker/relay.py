"""The relay of one container: a second container in its network name space, in which it reaches nothing but a program.

The program listens at the loopback device and carries what connects over its standard input and output. It has its own
file system and processes, so that nothing in the first container can change it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException

from headrace_containers.docker.engine import OWNER, UNTIL, Engine, Images
from headrace_containers.docker.execs import Stream
from headrace_containers.network import channels
from headrace_containers.network.gate import Gate
from headrace_containers.provider import ENDPOINT_PORT, MIB, PROXY_PORT, BadSpec, ContainerLost, Network

_READY_S = 30.0
_PROGRAM = f"\nasyncio.get_event_loop().run_until_complete(relay([{PROXY_PORT}, {ENDPOINT_PORT}]))\n"
_HEADER_BYTES, _MOST_SAID = 8, 2000
_KEY = "provider_options.relay_image"


class Relay:
    """See the module. It is ready once it is made; connections are refused until `use`."""

    def __init__(self, engine: Engine, images: Images, container: str, labels: dict[str, str]) -> None:
        image = images.named(engine.options.relay_image, _KEY)
        host = engine.api.create_host_config(
            network_mode=f"container:{container}",
            init=True,
            auto_remove=True,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=128 * MIB,
            memswap_limit=128 * MIB,
            pids_limit=32,
            log_config={"type": "none", "config": {}},
        )
        self._engine, self._said = engine, b""
        with engine.asked("the relay of a container cannot be started"):
            made = engine.api.create_container(
                image["Id"],
                entrypoint=["python3", "-I", "-c", inspect.getsource(channels) + _PROGRAM],
                user="65533:65533",
                stdin_open=True,
                labels={OWNER: labels[OWNER], UNTIL: labels[UNTIL]},
                host_config=host,
            )
            self._id = made["Id"]
            self._stream = Stream(
                engine.api.attach_socket(self._id, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            )
            try:
                engine.api.start(self._id)
            except APIError as error:
                self.close()
                raise BadSpec(
                    _KEY, f"{engine.options.relay_image} does not run python3: {error.explanation}"
                ) from error
        self._gate = Gate(Network())
        try:
            _run(self._open()).result(_READY_S)
        except (TimeoutError, ContainerLost) as error:
            self.close()
            said = self._said.decode(errors="replace").strip()
            raise BadSpec(
                _KEY, f"the relay in {engine.options.relay_image} does not start: {said or error}"
            ) from error

    def use(self, network: Network) -> None:
        """From now on it carries what this network allows."""
        self._gate = Gate(network)

    def close(self) -> None:
        """Ends it, and all connections."""
        self._stream.close()
        with suppress(DockerException, RequestException, OSError):
            self._engine.api.remove_container(self._id, force=True, v=True)

    async def _open(self) -> None:
        # The loop closes its own descriptor. Were `close` to do so from another thread, the loop would still know the
        # number when the next relay's socket gets it, and never read that one.
        given = self._stream.socket.dup()
        given.setblocking(False)
        raw, writer = await asyncio.open_connection(sock=given)
        reader = asyncio.StreamReader(limit=1 << 20)

        async def send_bytes(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        async def opened(channel: channels.Channel, port: int) -> None:
            await self._gate.opened(channel, port)

        async def serve() -> None:
            unpacking = asyncio.create_task(self._unpack(raw, reader))
            try:
                await connections.serve()
            finally:
                unpacking.cancel()
                writer.close()

        connections = channels.Channels(reader, send_bytes, opened)
        serving = asyncio.create_task(serve())
        _serving.add(serving)
        serving.add_done_callback(_serving.discard)
        ready = asyncio.create_task(connections.ready.wait())
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED, timeout=_READY_S)
        if not ready.done():
            ready.cancel()
            raise ContainerLost(
                "it ended at once" if serving.done() else f"it was not ready within {_READY_S:g} s"
            )

    async def _unpack(self, raw: asyncio.StreamReader, reader: asyncio.StreamReader) -> None:
        """What the engine sends, without its headers."""
        try:
            while True:
                header = await raw.readexactly(_HEADER_BYTES)
                data = await raw.readexactly(int.from_bytes(header[4:], "big"))
                if header[0] == 1:
                    reader.feed_data(data)
                else:
                    self._said = (self._said + data)[-_MOST_SAID:]
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            reader.feed_eof()


_serving: set[asyncio.Task[None]] = set()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of all relays of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="relays", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, None]) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(work, _loop())
