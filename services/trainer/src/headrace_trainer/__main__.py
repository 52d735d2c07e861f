"""The trainer's process: what is mounted on its instance."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_servicekit.entry import Close, run_service
from headrace_servicekit.memory.allocator import keep_freed_memory

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance

LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    keep_freed_memory()
    run_service("trainer", mount, argv)


async def mount(instance: Instance) -> Close:
    """Adds the services to an instance that has not started; returns what ends them."""
    import torch
    from headrace.common.v1 import weights_pb2_grpc
    from headrace.trainer.v1 import trainer_pb2_grpc
    from headrace_modelkit.broadcasting import Broadcasts
    from headrace_modelkit.devices import grow_segments
    from headrace_servicekit.weights.serving import WeightServicer

    from headrace_trainer.offered import capabilities
    from headrace_trainer.service import TrainerServicer

    # Before any thread of torch, which all do as this one then: a product with denormals takes many times as long.
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)  # until a lease says more: two busy thread pools on one core cost tenfold
    grow_segments()
    servicer = TrainerServicer(instance)
    instance.capabilities |= capabilities()
    instance.capabilities["transports"] = ["cuda_ipc", "shm", "collective", "delta", "grpc"]
    instance.add_service(
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, "headrace.trainer.v1.TrainerService"
    )
    instance.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(instance.weights, Broadcasts(servicer.own_device), servicer.copies),
        "headrace.common.v1.WeightService",
    )
    return servicer.close


if __name__ == "__main__":
    main()
