"""The reward service's process: parses, wires, serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_servicekit.errors import ServiceError
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    config = parse_instance_config("reward", argv)
    try:
        asyncio.run(serve(config))
    except ServiceError as error:
        sys.exit(f"headrace-reward: {error.message}")


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
    """Adds the service to an instance that has not started; returns what ends its children.

    Where the process has its deadlines off (`headrace debug`), scorers run in it, without children.
    """
    from headrace.reward.v1 import reward_pb2_grpc
    from headrace_servicekit.client import deadlines_enabled

    from headrace_reward.config import PoolSettings
    from headrace_reward.pool import list_scorers
    from headrace_reward.runs import Runs
    from headrace_reward.service import RewardServicer

    settings = PoolSettings.from_environment()
    catalogue = await list_scorers(settings)
    runs = Runs(Path.cwd(), settings, inline=not deadlines_enabled())
    instance.capabilities["scorers"] = [entry["name"] for entry in catalogue]
    instance.add_service(
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        RewardServicer(instance, runs, catalogue),
        "headrace.reward.v1.RewardService",
    )
    return runs.close_all


if __name__ == "__main__":
    main()
