"""Which connections of a container are carried, and where to: its endpoint, and hosts of its list by HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from headrace_containers.network.channels import Channel, joined
from headrace_containers.provider import ENDPOINT_PORT, BadSpec, Network

_MOST_HEAD = 1 << 16
_HEAD_S, _CONNECT_S = 30.0, 30.0
_NAME = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9._-]{0,252})")
KEY = "network.allow"


class Refused(Exception):
    """A connection that is not carried; the sentence is the answer's body."""


def host_and_port(text: str, key: str, port: int = 0) -> tuple[str, int]:
    """A HOST:PORT; an IPv6 address stands in brackets. Raises BadSpec."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/]+)(?::(\d{1,5}))?", text.lower())
    number = int(found[2]) if found and found[2] else port
    if not found or not 0 <= number <= 65535:
        raise BadSpec(key, f"{text!r} is no HOST:PORT")
    return found[1].strip("[]"), number


class Gate:
    """Of one container. Raises BadSpec for a network that is none."""

    def __init__(self, network: Network) -> None:
        self._allowed = [host_and_port(each, KEY) for each in network.allow]
        for host, _ in self._allowed:
            if not _address(host) and not _NAME.fullmatch(host):
                raise BadSpec(KEY, f"{host!r} is no host; give HOST, HOST:PORT, *.HOST or an address")
        self._endpoint = host_and_port(network.endpoint, "network.endpoint") if network.endpoint else None
        if self._endpoint and not self._endpoint[1]:
            raise BadSpec("network.endpoint", f"{network.endpoint!r} has no port")

    async def opened(self, channel: Channel, port: int) -> None:
        """Serves a connection that came in at a port of the container's."""
        try:
            if port == ENDPOINT_PORT:
                await self._to_endpoint(channel)
            else:
                await self._by_proxy(channel)
        except (ConnectionError, OSError):
            pass
        finally:
            with suppress(ConnectionError, OSError):
                await channel.close()

    async def _to_endpoint(self, channel: Channel) -> None:
        if self._endpoint is not None:
            reader, writer = await asyncio.open_connection(*self._endpoint)
            await joined(channel, reader, writer)

    async def _by_proxy(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(_HEAD_S):
                head, rest = await _head(channel)
            host, port, first = _wanted(head)
            reader, writer = await self._connected(host, port)
        except (Refused, TimeoutError) as why:
            body = f"headrace: {why}\n".encode()
            length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            await channel.write(b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\n" + length + body)
            await channel.end()
            return
        if first:
            writer.write(first + rest)
        else:
            await channel.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            writer.write(rest)
        await joined(channel, reader, writer)

    async def _connected(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to an address that was checked: a name that leads elsewhere a moment later changes nothing."""
        if not any(_is(host, port, *allowed) for allowed in self._allowed):
            raise Refused(f"{host}:{port} is not in {KEY}")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Refused(f"{host} has no address: {error}") from error
        address = str(found[0][4][0])
        if not _address(host) and not ipaddress.ip_address(address).is_global:
            raise Refused(
                f"{host} leads to {address}, which is no public address; list the address itself in {KEY}"
            )
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            raise Refused(f"{host}:{port} does not answer: {error}") from error


def _is(host: str, port: int, allowed: str, allowed_port: int) -> bool:
    if port != allowed_port if allowed_port else port not in (80, 443):
        return False
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    ours, theirs = _address(host), _address(allowed)
    return ours == theirs if ours or theirs else host == allowed


def _address(host: str) -> Any:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


async def _head(channel: Channel) -> tuple[bytes, bytes]:
    """The head of a request, and what came behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await channel.read()
        data += piece
        if not piece or len(data) > _MOST_HEAD:
            raise Refused("no head of an HTTP request")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _wanted(head: bytes) -> tuple[str, int, bytes]:
    """Host, port, and the head that is sent there; none for CONNECT."""
    line, _, others = head.partition(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3:
        raise Refused("no line of an HTTP request")
    method, target, version = words
    try:
        if method == "CONNECT":
            return (*host_and_port(target, KEY, 443), b"")
        url = urlsplit(target)
        if url.scheme != "http" or not url.hostname:
            raise Refused("a proxy is asked with CONNECT HOST:PORT, or for http://HOST/…")
        host, port = url.hostname.lower(), url.port or 80
    except (BadSpec, ValueError) as error:
        raise Refused(f"{target[:200]!r} is no address") from error
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    # One request a connection: the next one may be for another host.
    kept = [
        each
        for each in others.split(b"\r\n")
        if not each.lower().startswith((b"connection:", b"proxy-", b"host:"))
    ]
    lines = [
        f"{method} {path} {version}\r\nHost: {url.netloc.rpartition('@')[2]}\r\nConnection: close".encode(
            "latin-1"
        ),
        *filter(None, kept),
    ]
    return host, port, b"\r\n".join(lines) + b"\r\n\r\n"
