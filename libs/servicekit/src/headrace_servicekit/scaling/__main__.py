"""The scaler's process: `python -m headrace_servicekit.scaling kubernetes|docker`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace_servicekit.instance_config import read_token
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.process.supervisor_link import SupervisorLink
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.scaling.docker import Docker
from headrace_servicekit.scaling.kubernetes import Kubernetes
from headrace_servicekit.scaling.orchestrator import Orchestrator, Scaler, numbers_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; 2 for settings that cannot be."""
    arguments = _parse(argv)
    configure_logging(os.environ.get("HEADRACE_LOG_LEVEL", "info"), instance=f"scaler-{arguments.engine}")
    try:
        token = read_token(arguments.token_file)
        scaler = Scaler(_orchestrator(arguments), numbers_of(arguments.instances))
    except (ServiceError, ValueError) as error:
        print(f"headrace-scaler: {getattr(error, 'message', error)}", file=sys.stderr)
        return 2
    asyncio.run(_serve(SupervisorLink(arguments.engine, arguments.coordinator, token, scaler)))
    return 0


async def _serve(link: SupervisorLink) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    link.start()
    await stop.wait()
    await link.stop()


def _orchestrator(arguments: argparse.Namespace) -> Orchestrator:
    targets = dict(item.partition("=")[::2] for item in arguments.targets.split(",") if item)
    if arguments.engine == "docker":
        return Docker(arguments.project, tuple(targets))
    return Kubernetes(arguments.api, targets)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    environment = os.environ.get
    host, port = environment("KUBERNETES_SERVICE_HOST", ""), environment("KUBERNETES_SERVICE_PORT", "443")
    token_file = environment("HEADRACE_TOKEN_FILE")
    parser = argparse.ArgumentParser(
        prog="headrace-scaler", description="Scales services for the coordinator."
    )
    parser.add_argument("engine", choices=["docker", "kubernetes"])
    parser.add_argument("--coordinator", default=environment("HEADRACE_COORDINATOR", ""), help="host:port")
    parser.add_argument("--token-file", type=Path, default=Path(token_file) if token_file else None)
    parser.add_argument(
        "--targets",
        default=environment("HEADRACE_SCALER_TARGETS", ""),
        help="KIND=deployments/NAME,… of Kubernetes; KIND,… of compose (HEADRACE_SCALER_TARGETS)",
    )
    parser.add_argument(
        "--instances",
        default=environment("HEADRACE_SCALER_INSTANCES", ""),
        help="KIND=NUMBER,… of a container, where it has several (HEADRACE_SCALER_INSTANCES)",
    )
    parser.add_argument(
        "--api", default=f"https://{host}:{port}", help="Kubernetes' API; default: the cluster's own"
    )
    parser.add_argument(
        "--project", default=environment("HEADRACE_SCALER_PROJECT", "headrace"), help="of compose"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
