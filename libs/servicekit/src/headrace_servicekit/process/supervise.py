"""Entry point of a container: supervises one instance, or several of one kind that share the container's devices.

python -m headrace_servicekit.process.supervise --kind rollout -- python -m headrace_rollout --devices cpu:0
python -m headrace_servicekit.process.supervise --kind trainer --count devices -- python -m headrace_trainer
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

from headrace_servicekit.instance_config import KINDS, read_token
from headrace_servicekit.lease.devices import instance_count
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.process.supervisor import Supervisor, stop_grace_s
from headrace_servicekit.rpc.addresses import host_port, split_address
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
        lambda kind, index, incarnation: [*arguments.command, *_ports(index)],
        arguments.log_dir,
        name=lambda kind, index: _name(arguments, kind, index),
        echo=True,
    )

    def stop() -> None:
        if asked_to_stop.is_set():
            supervisor.hurry()
        asked_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    supervisor.set_count(arguments.kind, arguments.count)
    try:
        await supervisor.start()
    except OSError as error:
        print(f"headrace-supervise: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    await asked_to_stop.wait()
    return 1 if await supervisor.stop(arguments.grace) else 0


def _name(arguments: argparse.Namespace, kind: str, index: int) -> str:
    if arguments.count == 1:
        return str(arguments.name or f"{kind}-{arguments.host}")
    return f"{arguments.name}-{index}" if arguments.name else f"{kind}-{index}-{arguments.host}"


def _ports(index: int) -> list[str]:
    """Flags of all instances but the first: ports next to those that HEADRACE_LISTEN and HEADRACE_METRICS_PORT name."""
    flags: list[str] = []
    listen, metrics = os.environ.get("HEADRACE_LISTEN", ""), os.environ.get("HEADRACE_METRICS_PORT", "")
    if index and listen:
        host, port = split_address(listen)
        flags += ["--listen", host_port(host, int(port) and int(port) + index)]
    if index and metrics.isdecimal():
        flags += ["--metrics-port", str(int(metrics) and int(metrics) + index)]
    return flags


def _log_dir() -> Path:
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-logs"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    environment = os.environ.get
    token_file = environment("HEADRACE_TOKEN_FILE")
    parser = argparse.ArgumentParser(
        prog="headrace-supervise", description="Supervises instances of one kind."
    )
    parser.add_argument("--kind", required=True, choices=[*KINDS, "coordinator"])
    parser.add_argument("--name", default=environment("HEADRACE_NAME", ""), help="default: KIND-HOST")
    parser.add_argument("--host", default=environment("HEADRACE_HOST") or socket.gethostname())
    parser.add_argument(
        "--count",
        default=environment("HEADRACE_COUNT", "1"),
        help="number of instances, which share the devices, or 'devices': one for each (HEADRACE_COUNT)",
    )
    parser.add_argument("--coordinator", default=environment("HEADRACE_COORDINATOR", ""), help="host:port")
    parser.add_argument("--token-file", type=Path, default=Path(token_file) if token_file else None)
    parser.add_argument("--log-dir", type=Path, default=_log_dir())
    parser.add_argument(
        "--grace",
        type=float,
        help="seconds from SIGTERM to SIGKILL; default: HEADRACE_DRAIN_GRACE_S and 15 more",
    )
    parser.add_argument("command", nargs="+", help="the instance's command, after --")
    arguments = parser.parse_args(argv)
    try:
        arguments.count = instance_count(arguments.count)
    except ValueError as error:
        parser.error(f"--count (HEADRACE_COUNT): {error}")
    if arguments.grace is None:
        arguments.grace = stop_grace_s(arguments.kind)
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
