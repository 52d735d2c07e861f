"""The simulator service's process: parses, wires, serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from headrace_servicekit.errors import ServiceError
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    config = parse_instance_config("simulator", argv)
    try:
        asyncio.run(serve(config))
    except ServiceError as error:
        sys.exit(f"headrace-simulator: {error.message}")


async def serve(config: InstanceConfig) -> None:
    """Serves one instance; its children die with it."""
    # Not at the top: `--help` answers without a server's imports.
    from headrace_servicekit.instance import Instance

    instance = Instance(config)
    close = await mount(instance)
    try:
        await instance.run()
    finally:
        await close()


async def mount(instance: Instance) -> Callable[[], Awaitable[None]]:
    """Adds the service to an instance that has not started; returns what ends its children."""
    from headrace.simulator.v1 import simulator_pb2_grpc

    from headrace_simulator.config import SimulatorSettings
    from headrace_simulator.host import list_environments
    from headrace_simulator.pools import Pools
    from headrace_simulator.service import SimulatorServicer

    settings = SimulatorSettings.from_environment()
    catalogue = await list_environments(settings.open_timeout_s)
    pools = Pools(settings)
    instance.capabilities["backends"] = sorted({backend for backend, _ in catalogue})
    instance.add_service(
        simulator_pb2_grpc.add_SimulatorServiceServicer_to_server,
        SimulatorServicer(instance, pools, catalogue, settings),
        "headrace.simulator.v1.SimulatorService",
    )
    return pools.close_all


if __name__ == "__main__":
    main()
