"""Entry point of a container: supervises one instance.

python -m headrace_servicekit.process.supervise --kind rollout -- python -m headrace_rollout --devices cpu:0
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace_servicekit.instance_config import read_token
from headrace_servicekit.kinds import KINDS
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.process.supervisor import Supervisor, stop_grace_s
from headrace_servicekit.rpc.errors import ServiceError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; returns 0, or 1 when the instance did not stop cleanly.

    A second signal is passed on too: the instance then waits for no coordinator.
    """
    arguments = _parse(argv)
    configure_logging(os.environ.get("HEADRACE_LOG_LEVEL", "info"), instance=f"supervisor-{arguments.host}")
    try:
        token = read_token(arguments.token_file)
    except ServiceError as error:
        print(f"headrace-supervise: {error.message}", file=sys.stderr)
        return 2
    return asyncio.run(_supervise(arguments, token))


async def _supervise(arguments: argparse.Namespace, token: str | None) -> int:
    asked_to_stop = asyncio.Event()
    supervisor = Supervisor(
        arguments.host,
        arguments.coordinator,
        token,
        lambda kind, index, incarnation: arguments.command,
        arguments.log_dir,
        name=lambda kind, index: arguments.name or f"{kind}-{arguments.host}",
        echo=True,
    )

    def stop() -> None:
        if asked_to_stop.is_set():
            supervisor.hurry()
        asked_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    supervisor.set_count(arguments.kind, 1)
    await supervisor.start()
    await asked_to_stop.wait()
    return 1 if await supervisor.stop(arguments.grace) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    environment = os.environ.get
    token_file = environment("HEADRACE_TOKEN_FILE")
    parser = argparse.ArgumentParser(prog="headrace-supervise", description="Supervises one instance.")
    parser.add_argument("--kind", required=True, choices=[*KINDS, "coordinator"])
    parser.add_argument("--name", default=environment("HEADRACE_NAME", ""), help="default: KIND-HOST")
    parser.add_argument("--host", default=environment("HEADRACE_HOST") or socket.gethostname())
    parser.add_argument("--coordinator", default=environment("HEADRACE_COORDINATOR", ""), help="host:port")
    parser.add_argument("--token-file", type=Path, default=Path(token_file) if token_file else None)
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()) / "headrace-logs")
    parser.add_argument(
        "--grace",
        type=float,
        help="seconds from SIGTERM to SIGKILL; default: HEADRACE_DRAIN_GRACE_S and 15 more",
    )
    parser.add_argument("command", nargs="+", help="the instance's command, after --")
    arguments = parser.parse_args(argv)
    if arguments.grace is None:
        arguments.grace = stop_grace_s(arguments.kind)
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
