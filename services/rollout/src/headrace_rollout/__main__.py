"""The rollout's process: what is mounted on its instance. torch is imported when a run is opened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.entry import Close, run_service
from headrace_servicekit.process.allocator import reuse_freed_memory

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance

LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    reuse_freed_memory()
    run_service("rollout", mount, argv)


async def mount(instance: Instance) -> Close:
    """Adds the services to an instance that has not started; returns what ends them: nothing."""
    from headrace.common.v1 import weights_pb2_grpc
    from headrace.rollout.v1 import rollout_pb2_grpc
    from headrace_servicekit.weights import WeightServicer

    from headrace_rollout.engines import ENGINES, installed_engines
    from headrace_rollout.service import RolloutServicer

    instance.capabilities |= {
        "engines": installed_engines(),
        "engine_options": ENGINES.capabilities(LOG.warning),
        "transports": ["shm", "grpc"],
    }
    instance.add_service(
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        RolloutServicer(instance),
        "headrace.rollout.v1.RolloutService",
    )
    instance.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(instance.weights),
        "headrace.common.v1.WeightService",
    )

    async def close() -> None:
        return

    return close


if __name__ == "__main__":
    main()
