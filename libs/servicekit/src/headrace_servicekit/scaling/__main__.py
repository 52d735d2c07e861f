"""The scaler, a supervisor without processes: `python -m headrace_servicekit.scaling kubernetes|docker`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from headrace_servicekit.instance_config import read_token
from headrace_servicekit.logs import configure_logging, get_logger
from headrace_servicekit.process.child import ProcessInfo
from headrace_servicekit.process.supervisor_link import SupervisorLink
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.scaling.orchestrators import Docker, Kubernetes

LOOK_S = 5.0
"""Between two looks at which containers there are."""
REMEMBERED = 256
_logger = get_logger(__name__)


class Orchestrator(Protocol):
    """Runs containers of services, by kind. Its calls block."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of which it can change the number."""

    def scale(self, kind: str, containers: int) -> str:
        """Sets the wanted number of containers of a kind, without waiting; returns why that cannot be, or ""."""

    def hosts(self) -> set[str]:
        """Host names of the fleet's containers that have not ended. Raises OSError where nobody can tell."""


class Scaler:
    """Passes the coordinator's numbers of instances on, as numbers of containers."""

    def __init__(self, orchestrator: Orchestrator, instances: Mapping[str, int]) -> None:
        """`instances`: how many a container of a kind has; 1 where it is not named."""
        self._orchestrator = orchestrator
        self._instances = instances
        self._seen: set[str] = set()
        self._gone: dict[str, None] = {}
        self._blind = ""

    @property
    def scalable_kinds(self) -> tuple[str, ...]:
        """Kinds whose number the coordinator may change."""
        return self._orchestrator.kinds

    async def scale(self, kind: str, n: int) -> str:
        """Wants `n` instances of a kind; returns why that cannot be, or ""."""
        each = self._instances.get(kind, 1)
        if n % each:
            return f"scale {kind}={n}: a container of it has {each} instances; ask for a multiple of {each}"
        refusal = await asyncio.to_thread(self._orchestrator.scale, kind, n // each)
        _logger.info("scaled", extra={"kind": kind, "containers": n // each, "refusal": refusal})
        return refusal

    async def look(self) -> list[str]:
        """Hosts that were there at an earlier look and are gone, all that are remembered; the newest last."""
        try:
            hosts = await asyncio.to_thread(self._orchestrator.hosts)
        except OSError as error:
            if str(error) != self._blind:
                _logger.warning("cannot see which containers are gone", extra={"why": str(error)})
            self._blind = str(error)
            return []
        self._blind = ""
        for host in sorted(self._seen - hosts):
            self._gone[host] = None
        for host in [*(self._gone.keys() & hosts), *[*self._gone][:-REMEMBERED]]:
            del self._gone[host]
        self._seen = hosts
        return [*self._gone]

    def processes(self) -> list[ProcessInfo]:
        """None: each container has a supervisor of its own."""
        return []

    def kill(self, instance: str, incarnation: str, reason: str = "") -> bool:
        """Kills nothing: the container's own supervisor does."""
        return False


def numbers_of(text: str) -> dict[str, int]:
    """Numbers by kind from "rollout=1,trainer=4". Raises ValueError."""
    found = {}
    for item in filter(None, text.split(",")):
        kind, equals, number = item.partition("=")
        if not equals or not number.isdecimal() or not int(number):
            raise ValueError(f"{item!r}; write KIND=NUMBER, separated by commas")
        found[kind] = int(number)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT; 2 for settings that cannot be."""
    arguments = parse(argv)
    configure_logging(os.environ.get("HEADRACE_LOG_LEVEL", "info"), instance=f"scaler-{arguments.engine}")
    try:
        token = read_token(arguments.token_file)
        scaler = Scaler(orchestrator_of(arguments), numbers_of(arguments.instances))
    except (ServiceError, ValueError) as error:
        print(f"headrace-scaler: {getattr(error, 'message', error)}", file=sys.stderr)
        return 2
    asyncio.run(_serve(SupervisorLink(arguments.engine, arguments.coordinator, token, scaler), scaler))
    return 0


async def _serve(link: SupervisorLink, scaler: Scaler) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    link.start()
    while not stop.is_set():
        link.report_gone(await scaler.look())
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stop.wait()
    await link.stop()


def orchestrator_of(arguments: argparse.Namespace) -> Orchestrator:
    """The one that is named. Raises ValueError for settings that cannot be."""
    targets = dict(item.partition("=")[::2] for item in arguments.targets.split(",") if item)
    if arguments.engine == "docker":
        return Docker(arguments.project, tuple(targets))
    return Kubernetes(targets, arguments.namespace, arguments.selector)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags, with HEADRACE_* as defaults."""
    environment = os.environ.get
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
        "--namespace",
        default=environment("HEADRACE_SCALER_NAMESPACE", ""),
        help="of the fleet's pods (HEADRACE_SCALER_NAMESPACE)",
    )
    parser.add_argument(
        "--selector",
        default=environment("HEADRACE_SCALER_SELECTOR", ""),
        help="of the fleet's pods, by labels (HEADRACE_SCALER_SELECTOR)",
    )
    parser.add_argument(
        "--project", default=environment("HEADRACE_SCALER_PROJECT", "headrace"), help="of compose"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
