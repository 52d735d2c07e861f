"""An HTTP proxy for code that has no network: which hosts it is carried to, and the heads of its requests."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_MOST_HEAD = 1 << 16
_HEAD_S, _CONNECT_S = 30.0, 30.0
_NAME = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9._-]{0,252})")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class BadHost(ValueError):
    """A text that is no host; one sentence."""


class Refused(Exception):
    """A connection that is not carried; the sentence is the answer's body."""


class Hosts:
    """A list of HOST, HOST:PORT, *.HOST or addresses, as `listed` names it; without a port those of http and https.

    `everywhere`: names may lead to addresses that are not public. Raises BadHost.
    """

    def __init__(self, texts: Sequence[str], listed: str, *, everywhere: bool = False) -> None:
        self._allowed = [host_and_port(each) for each in texts]
        self._listed, self._everywhere = listed, everywhere
        for host, _ in self._allowed:
            if not _address(host) and not _NAME.fullmatch(host):
                raise BadHost(f"{host!r} is no host; give HOST, HOST:PORT, *.HOST or an address")

    async def request(
        self, read: Callable[[], Awaitable[bytes]], write: Callable[[bytes], Awaitable[None]]
    ) -> Streams | None:
        """Reads the head of a request and connects to its host; None where it is refused, which is answered."""
        try:
            async with asyncio.timeout(_HEAD_S):
                head, rest = await _head(read)
            host, port, first = _wanted(head)
            streams = await self._connected(host, port)
        except (Refused, TimeoutError) as why:
            body = f"headrace: {why}\n".encode()
            length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            await write(b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\n" + length + body)
            return None
        if not first:
            await write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        streams[1].write(first + rest)
        return streams

    async def _connected(self, host: str, port: int) -> Streams:
        """Connects to an address that was checked: a name that leads elsewhere a moment later changes nothing."""
        if not any(_is(host, port, *allowed) for allowed in self._allowed):
            raise Refused(f"{host}:{port} is not in {self._listed}")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Refused(f"{host} has no address: {error}") from error
        address = str(found[0][4][0])
        if not (self._everywhere or _address(host) or ipaddress.ip_address(address).is_global):
            raise Refused(
                f"{host} leads to {address}, which is no public address; list the address itself in {self._listed}"
            )
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            raise Refused(f"{host}:{port} does not answer: {error}") from error


def host_and_port(text: str, port: int = 0) -> tuple[str, int]:
    """A HOST:PORT; an IPv6 address stands in brackets. Raises BadHost."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]/]+)(?::(\d{1,5}))?", text.lower())
    number = int(found[2]) if found and found[2] else port
    if not found or not 0 <= number <= 65535:
        raise BadHost(f"{text!r} is no HOST:PORT")
    return found[1].strip("[]"), number


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


async def _head(read: Callable[[], Awaitable[bytes]]) -> tuple[bytes, bytes]:
    """The head of a request, and what came behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await read()
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
            return (*host_and_port(target, 443), b"")
        url = urlsplit(target)
        if url.scheme != "http" or not url.hostname:
            raise Refused("a proxy is asked with CONNECT HOST:PORT, or for http://HOST/…")
        host, port = url.hostname.lower(), url.port or 80
    except ValueError as error:
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
