"""A service's process from its command line to its end. Imports no server before `--help` has been answered."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.descriptors import raise_limit
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config
from headrace_servicekit.lease.devices import prepare_torch, show_part
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.rpc.addresses import keep_collectives_at
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.tracing import TracingMissing, start_tracing, stop_tracing

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance

Close = Callable[[], Awaitable[None]]
Mount = Callable[["Instance"], Awaitable[Close]]
"""Adds a service to an instance that has not started; returns what ends what it has started."""


def run_service(kind: str, mount: Mount, argv: Sequence[str] | None = None) -> None:
    """Runs one instance until SIGTERM, SIGINT or a drain. A refusal to start is one sentence and exit code 2."""
    config = parse_instance_config(kind, argv)
    configure_logging(config.log_level, instance=config.name)
    raise_limit()
    keep_collectives_at(config.listen)
    prepare_torch()
    show_part(config.devices)
    try:
        asyncio.run(_serve(config, mount))
    except (ServiceError, TracingMissing) as error:
        print(f"headrace-{kind}: {message_of(error)}", file=sys.stderr)
        raise SystemExit(2) from error
    # The loop has given the signals back: one that is sent again while Python ends would make a clean end a failed one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


async def _serve(config: InstanceConfig, mount: Mount) -> None:
    from headrace_servicekit.instance import Instance

    start_tracing(config.otlp_endpoint, config.kind, config.name)
    instance = Instance(config)
    close = await mount(instance)
    try:
        await instance.run()
    finally:
        await close()
        await asyncio.to_thread(stop_tracing)
