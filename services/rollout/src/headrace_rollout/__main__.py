"""Starts a rollout instance: `python -m headrace_rollout --help`. torch is imported when a run is opened."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from headrace.common.v1 import weights_pb2_grpc
from headrace.rollout.v1 import rollout_pb2_grpc
from headrace_servicekit.devices import let_idle_threads_sleep
from headrace_servicekit.errors import ServiceError
from headrace_servicekit.instance import Instance, InstanceConfig, parse_instance_config
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.weights import WeightServicer

from headrace_rollout.engines import engine_names
from headrace_rollout.service import RolloutServicer


def build_instance(config: InstanceConfig) -> Instance:
    """The instance with its services mounted, not yet listening. Needs a running event loop."""
    instance = Instance(config)
    instance.capabilities = {"engines": engine_names(), "transports": ["shm", "grpc"]}
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
    return instance


async def _serve(config: InstanceConfig) -> None:
    await build_instance(config).run()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    config = parse_instance_config("rollout", argv)
    configure_logging(config.log_level, instance=config.name)
    let_idle_threads_sleep()
    try:
        asyncio.run(_serve(config))
    except ServiceError as error:
        sys.exit(f"headrace-rollout: {error.message}")


if __name__ == "__main__":
    main()
