"""headrace-trainer: parses, wires, serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.errors import ServiceError
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    config = parse_instance_config("trainer", argv)
    from headrace_servicekit.devices import let_idle_threads_sleep

    from headrace_trainer.allocator import keep_freed_memory

    let_idle_threads_sleep()
    keep_freed_memory()
    try:
        asyncio.run(serve(config))
    except ServiceError as error:
        sys.exit(f"headrace-trainer: {error.message}")


async def serve(config: InstanceConfig) -> None:
    """Serves one instance to its end."""
    # Not at the top: `--help` must not wait for a server's imports, nor for torch.
    from headrace_servicekit.instance import Instance

    instance = Instance(config)
    close = await mount(instance)
    try:
        await instance.run()
    finally:
        await close()


async def mount(instance: Instance) -> Callable[[], Awaitable[None]]:
    """Adds the services to an instance that has not started; returns what ends them."""
    import torch
    from headrace.common.v1 import weights_pb2_grpc
    from headrace.trainer.v1 import trainer_pb2_grpc
    from headrace_servicekit.weights import WeightServicer

    from headrace_trainer.algorithms import algorithm_names
    from headrace_trainer.backends import backend_names
    from headrace_trainer.service import TrainerServicer

    torch.set_num_threads(1)  # until a lease says more: two busy thread pools on one core cost tenfold
    servicer = TrainerServicer(instance)
    instance.capabilities["backends"] = backend_names()
    instance.capabilities["algorithms"] = algorithm_names()
    instance.capabilities["transports"] = ["shm", "grpc"]
    instance.add_service(
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
        servicer,
        "headrace.trainer.v1.TrainerService",
    )
    instance.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(instance.weights),
        "headrace.common.v1.WeightService",
    )
    return servicer.close


if __name__ == "__main__":
    main()
