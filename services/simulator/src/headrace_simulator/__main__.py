"""The simulator service's process: what is mounted on its instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.entry import Close, run_service

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    run_service("simulator", mount, argv)


async def mount(instance: Instance) -> Close:
    """Adds the service to an instance that has not started; returns what ends its children."""
    from headrace.simulator.v1 import simulator_pb2_grpc
    from headrace_servicekit.config import settings_from_environment

    from headrace_simulator.config import SimulatorSettings
    from headrace_simulator.host import list_environments
    from headrace_simulator.pools import Pools
    from headrace_simulator.service import SimulatorServicer

    settings = settings_from_environment(SimulatorSettings, "HEADRACE_SIMULATOR_")
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
