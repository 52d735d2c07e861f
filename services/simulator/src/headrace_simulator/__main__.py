"""The simulator service's process: what is mounted on its instance."""

from __future__ import annotations

import asyncio
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
    from headrace.common.v1 import blobs_pb2_grpc
    from headrace.simulator.v1 import simulator_pb2_grpc
    from headrace_servicekit.config import settings_from_environment
    from headrace_servicekit.lease.devices import gpu_uuids
    from headrace_servicekit.memory.blobs import BlobServicer, BlobStore
    from headrace_servicekit.process.local import LocalStreams
    from headrace_servicekit.sandbox.isolation import NOT_HELD, contain, not_held

    from headrace_simulator.config import SimulatorSettings
    from headrace_simulator.pools.brokers import Brokers
    from headrace_simulator.pools.host import list_environments, task_capabilities
    from headrace_simulator.pools.open_pools import Pools
    from headrace_simulator.service import SimulatorServicer

    settings = settings_from_environment(SimulatorSettings, "HEADRACE_SIMULATOR_")
    contain(instance.capabilities)
    (catalogue, brokers), missing = await asyncio.gather(
        list_environments(settings.open_timeout_s, settings.robot), not_held()
    )
    # Its directory exists from here on; its address is known once the instance listens.
    blobs = BlobStore(instance.weights.directory)
    on_gpus = bool(gpu_uuids(instance.config.devices))
    pools = Pools(settings, blobs, Brokers(brokers, settings.open_timeout_s), on_gpus=on_gpus)
    instance.capabilities[NOT_HELD] = missing
    instance.capabilities["backends"] = sorted({backend for backend, _ in catalogue})
    instance.capabilities["tasks"] = task_capabilities(catalogue)
    local = LocalStreams(blobs.folder.parent)
    await local.listen()
    named = [(backend, name) for backend, name in catalogue if name]
    servicer = SimulatorServicer(instance, pools, named, settings, blobs, local)
    instance.on_grant, instance.on_revoke = servicer.on_grant, servicer.on_revoke
    instance.add_service(
        simulator_pb2_grpc.add_SimulatorServiceServicer_to_server,
        servicer,
        "headrace.simulator.v1.SimulatorService",
    )
    instance.add_service(
        blobs_pb2_grpc.add_BlobServiceServicer_to_server,
        BlobServicer(blobs),
        "headrace.common.v1.BlobService",
    )

    async def close() -> None:
        local.close()
        await pools.close_all()

    return close


if __name__ == "__main__":
    main()
