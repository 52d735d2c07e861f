"""What a container's connections are carried to, without an engine: the channels over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager, nullcontext

import pytest
from headrace_containers.docker.engine import OWNER, UNTIL
from headrace_containers.docker.options import DockerOptions
from headrace_containers.docker.relay import Relay
from headrace_containers.network.channels import MOST, READY, WINDOW, Channels, joined
from headrace_containers.network.gate import Gate
from headrace_containers.provider import ENDPOINT_PORT, PROXY_PORT, BadSpec, Network
from headrace_servicekit.contained.proxy import host_and_port


@asynccontextmanager
async def server(serve):
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    listening.close()


@asynccontextmanager
async def ends(opened):
    """Two ends of one stream; the second one's `opened` serves."""
    came = asyncio.get_running_loop().create_future()
    async with server(lambda reader, writer: came.set_result((reader, writer))) as port:
        pair = [await asyncio.open_connection("127.0.0.1", port), await came]

        def channels(reader, writer, opened):
            async def send(data):
                writer.write(data)
                await writer.drain()

            return Channels(reader, send, opened)

        made = [channels(*pair[0], None), channels(*pair[1], opened)]
        tasks = [asyncio.create_task(each.serve()) for each in made]
        yield made[0]
        for _, writer in pair:
            writer.close()
        await asyncio.gather(*tasks)


async def answer(channel, text):
    await channel.write(text.encode())
    found = b""
    while piece := await channel.read():
        found += piece
    return found.decode()


async def http(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
    await writer.drain()
    writer.close()


async def by_proxy(network, text):
    async with ends(Gate(network).opened) as container, asyncio.timeout(30):
        return await answer(await container.connect(PROXY_PORT), text)


async def test_a_listed_address_is_reached_and_its_head_is_rewritten():
    async with server(http) as port:
        address = f"127.0.0.1:{port}"
        asked = f"GET http://{address}/a?b=1 HTTP/1.1\r\nHost: other\r\nProxy-Connection: keep\r\nX-Own: 1\r\n\r\n"
        said = await by_proxy(Network(allow=(address,)), asked)
        assert said.endswith(
            f"GET /a?b=1 HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nX-Own: 1\r\n\r\n"
        )
        tunnel = await by_proxy(
            Network(allow=(address,)), f"CONNECT {address} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        )
        assert tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        async with ends(Gate(Network(endpoint=address)).opened) as container:
            assert "GET / " in await answer(await container.connect(ENDPOINT_PORT), "GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("allow", "asked", "said"),
    [
        ((), "GET http://example.com/ HTTP/1.1", "example.com:80 is not in network.allow"),
        (("example.com",), "CONNECT example.com:22 HTTP/1.1", "example.com:22 is not in network.allow"),
        (("example.com:22",), "CONNECT example.com:443 HTTP/1.1", "example.com:443 is not in network.allow"),
        (("*.example.com",), "CONNECT example.com:443 HTTP/1.1", "not in network.allow"),
        (("*.example.com",), "CONNECT badexample.com:443 HTTP/1.1", "not in network.allow"),
        (("example.com",), "CONNECT example.com.evil.org:443 HTTP/1.1", "not in network.allow"),
        (("127.0.0.1:1",), "CONNECT localhost:1 HTTP/1.1", "localhost:1 is not in network.allow"),
        (("localhost:1",), "CONNECT localhost:1 HTTP/1.1", "which is no public address"),
        (("127.0.0.1:1",), "CONNECT 127.0.0.1:1 HTTP/1.1", "does not answer"),
        (("10.0.0.1",), "CONNECT 0x0a000001:443 HTTP/1.1", "not in network.allow"),
        ((), "GET file:///etc/passwd HTTP/1.1", "a proxy is asked with"),
        ((), "GET http://u:p@[::1]:x/ HTTP/1.1", "is no address"),
        ((), "nonsense", "no line of an HTTP request"),
    ],
)
async def test_what_is_not_listed_is_refused_with_a_reason(allow, asked, said):
    found = await by_proxy(Network(allow=allow), asked + "\r\n\r\n")
    assert found.startswith("HTTP/1.1 403 Forbidden\r\n") and said in found


@pytest.mark.parametrize("allow", ["http://x/", "x:99999", "x:y", "", "a b", "*.*", "[::1"])
def test_an_entry_that_is_no_host_is_refused_by_its_key(allow):
    with pytest.raises(BadSpec) as caught:
        Gate(Network(allow=(allow,)))
    assert caught.value.key == "network.allow"
    with pytest.raises(BadSpec, match=r"network\.endpoint"):
        Gate(Network(endpoint="10.0.0.1"))
    assert host_and_port("[::1]:80") == ("::1", 80)


async def test_one_that_is_not_read_stops_no_other_and_memory_is_bounded():
    sent = 0

    async def flood(reader, writer):
        nonlocal sent
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with server(flood) as flooding, server(http) as port:

        async def opened(channel, which):
            reader, writer = await asyncio.open_connection("127.0.0.1", which)
            await joined(channel, reader, writer)

        async with ends(opened) as container, asyncio.timeout(60):
            stuck = await container.connect(flooding)
            assert len(await stuck.read()) > 0
            for _ in range(5):
                assert "GET / " in await answer(await container.connect(port), "GET / HTTP/1.1\r\n\r\n")
            assert stuck.held <= WINDOW
            waiting = [await container.connect(flooding) for _ in range(MOST - len(container.open))]
            assert all(waiting) and await container.connect(flooding) is None, "no more at once"


async def test_an_end_that_breaks_the_protocol_ends_its_connections():
    """A relay that sends more than it may, or nonsense, gets nothing for it."""
    given = asyncio.StreamReader()
    broken = []

    async def send(data):
        broken.append(data)

    async def opened(channel, port):
        with pytest.raises(ConnectionError):
            while True:
                await asyncio.sleep(0)
                if channel.held > WINDOW:
                    while True:
                        await channel.read()

    channels = Channels(given, send, opened)
    serving = asyncio.create_task(channels.serve())
    given.feed_data(b"\0\0\0\1\0\0\0\0\2\x0c\x38")
    piece = b"x" * (1 << 16)
    for _ in range(6):
        given.feed_data(b"\0\0\0\1\1\0\1\0\0" + piece)
    given.feed_data(b"\0\0\0\1\1\xff\xff\xff\xff")
    async with asyncio.timeout(30):
        await serving


class Engine:
    """As much of a Docker engine as starts relays; each answers over one end of a pair of sockets."""

    options = DockerOptions()

    def __init__(self):
        self.api, self._far = self, []

    def asked(self, what):
        return nullcontext()

    def named(self, image, key):
        return {"Id": image}

    def create_host_config(self, **host):
        return host

    def create_container(self, image, **given):
        return {"Id": "relay"}

    def attach_socket(self, id, params):
        near, far = socket.socketpair()
        self._far.append(far)
        return near

    def start(self, id):
        frame = struct.pack(">IBI", 0, READY, 0)
        self._far[-1].sendall(struct.pack(">BxxxI", 1, len(frame)) + frame)

    def remove_container(self, id, **how):
        pass


def test_relays_that_begin_as_others_end_are_all_read():
    # A socket that is closed under its event loop leaves its number there, and the next socket of that number is deaf.
    engine = Engine()
    for _ in range(200):
        Relay(engine, engine, "container", {OWNER: "", UNTIL: ""}).close()
