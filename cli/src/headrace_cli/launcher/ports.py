"""Whether the port that a user names is free."""

from __future__ import annotations

import socket

from headrace_servicekit.process.ports import LOOPBACK

from headrace_cli.errors import mistake


def require_free_port(port: int) -> None:
    """Raises CommandError (exit code 2) when the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            problem = f"{port} is in use by another program, maybe another fleet"
            raise mistake("--port", problem, "choose another with --port") from error
