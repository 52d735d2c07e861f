"""What a child and its broker say to each other: frames of a JSON header and bytes. One connection is one container."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from headrace_servicekit.process.worker_pipes import LENGTH, checked_size, frame

from headrace_containers.provider import BadPath, BadSpec, ContainerError, ContainerLost, EngineLost

SOCKET = "containers.sock"
"""Of the broker, in its folder."""
MOST_BYTES = 128 << 20
"""Of one frame."""
_ERRORS = {kind.__name__: kind for kind in (ContainerError, ContainerLost, EngineLost, BadPath)}


class Closed(Exception):
    """The other end is gone."""


def send(connection: socket.socket, header: Mapping[str, Any], payload: bytes = b"") -> None:
    """Sends a frame. Raises Closed."""
    try:
        connection.sendall(frame(json.dumps(header).encode() + b"\n" + payload))
    except OSError as error:
        raise Closed(str(error)) from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The next frame. Raises Closed; ValueError for what is no frame."""
    size = checked_size(_exactly(connection, LENGTH.size), MOST_BYTES)
    header, _, payload = _exactly(connection, size).partition(b"\n")
    found: dict[str, Any] = json.loads(header)
    return found, payload


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except OSError as error:
            raise Closed(str(error)) from error
        if not piece:
            raise Closed("the connection ended")
        data += piece
    return bytes(data)


def error_header(error: ContainerError) -> dict[str, Any]:
    """An error as a header."""
    if isinstance(error, BadSpec):
        return {"error": "BadSpec", "key": error.key, "message": error.message}
    kind = next(each for each in type(error).__mro__ if each.__name__ in _ERRORS)
    return {"error": kind.__name__, "message": str(error)}


def raise_error(header: Mapping[str, Any]) -> None:
    """Raises the error that a header has, if it has one."""
    if kind := header.get("error"):
        if kind == "BadSpec":
            raise BadSpec(str(header["key"]), str(header["message"]))
        raise _ERRORS[str(kind)](str(header["message"]))
