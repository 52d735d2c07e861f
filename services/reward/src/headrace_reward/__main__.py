"""The reward service's process: parses, wires, serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_servicekit.instance import InstanceConfig, parse_instance_config


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    config = parse_instance_config("reward", argv)
    asyncio.run(serve(config))


async def serve(config: InstanceConfig) -> None:
    """Serves one instance; its children die with it."""
    from headrace.reward.v1 import reward_pb2_grpc
    from headrace_servicekit.instance import Instance

    from headrace_reward.config import PoolSettings
    from headrace_reward.pool import list_scorers
    from headrace_reward.runs import Runs
    from headrace_reward.service import RewardServicer

    settings = PoolSettings.from_environment()
    catalogue = await list_scorers(settings)
    runs = Runs(Path.cwd(), settings)
    instance = Instance(config)
    instance.capabilities["scorers"] = [entry["name"] for entry in catalogue]
    instance.add_service(
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        RewardServicer(instance, runs, catalogue),
        "headrace.reward.v1.RewardService",
    )
    try:
        await instance.run()
    finally:
        await runs.close_all()


if __name__ == "__main__":
    main()
