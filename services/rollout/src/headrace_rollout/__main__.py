"""The rollout's process: what is mounted on its instance. torch is imported when a run is opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.entry import Close, run_service
from headrace_servicekit.memory.allocator import reuse_freed_memory

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance

LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    reuse_freed_memory()
    run_service("rollout", mount, argv)


async def mount(instance: Instance) -> Close:
    """Adds the services to an instance that has not started; returns what ends them."""
    from headrace.common.v1 import blobs_pb2_grpc, weights_pb2_grpc
    from headrace.rollout.v1 import rollout_pb2_grpc
    from headrace_servicekit.memory.blobs import BlobServicer
    from headrace_servicekit.weights.serving import WeightServicer

    from headrace_rollout.engines import ENGINES
    from headrace_rollout.moving import MovedCaches
    from headrace_rollout.service import RolloutServicer

    installed = ENGINES.installed()
    instance.capabilities |= {
        "engines": installed,
        "engine_features": ENGINES.features(installed),
        "engine_options": ENGINES.capabilities(LOG.warning),
        "transports": ["cuda_ipc", "shm", "collective", "delta", "grpc"],
    }
    caches = MovedCaches(instance.weights.directory, instance.token)
    instance.add_service(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        RolloutServicer(instance, caches),
        "headrace.rollout.v1.RolloutService",
    )
    instance.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(instance.weights),
        "headrace.common.v1.WeightService",
    )
    instance.add_service(
        blobs_pb2_grpc.add_BlobServiceServicer_to_server,
        BlobServicer(caches.blobs),
        "headrace.common.v1.BlobService",
    )
    return caches.close


if __name__ == "__main__":
    main()
