"""Free ports on the loopback interface."""

from __future__ import annotations

import socket

from headrace_cli.errors import mistake

LOOPBACK = "127.0.0.1"


def require_free_port(port: int) -> None:
    """Raises CommandError (exit code 2) when the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            problem = f"{port} is in use by another program, maybe another fleet"
            raise mistake("--port", problem, "choose another with --port") from error


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
