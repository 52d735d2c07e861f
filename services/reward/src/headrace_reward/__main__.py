"""The reward service's process: what is mounted on its instance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_servicekit.entry import Close, run_service

if TYPE_CHECKING:
    from headrace_servicekit.instance import Instance


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM, SIGINT or a drain."""
    run_service("reward", mount, argv)


async def mount(instance: Instance) -> Close:
    """Adds the service to an instance that has not started; returns what ends its children.

    Where the process has its deadlines off (`headrace debug`), scorers run in it, without children.
    """
    from headrace.reward.v1 import reward_pb2_grpc
    from headrace_servicekit.config import settings_from_environment
    from headrace_servicekit.registry import capability
    from headrace_servicekit.rpc.client import deadlines_enabled
    from headrace_servicekit.sandbox.isolation import NOT_HELD, contain, not_held

    from headrace_reward.config import PoolSettings
    from headrace_reward.pool import list_scorers
    from headrace_reward.runs import Runs
    from headrace_reward.service import RewardServicer

    settings = settings_from_environment(PoolSettings, "HEADRACE_REWARD_")
    contain(instance.capabilities)
    catalogue, missing = await asyncio.gather(list_scorers(settings), not_held())
    runs = Runs(Path.cwd(), settings, inline=not deadlines_enabled())
    instance.capabilities[NOT_HELD] = missing
    instance.capabilities["scorers"] = [entry["name"] for entry in catalogue]
    instance.capabilities["scorer_options"] = [
        capability(entry["name"], entry["options_schema"]) for entry in catalogue
    ]
    servicer = RewardServicer(instance, runs, catalogue)
    instance.on_grant, instance.on_revoke = servicer.on_grant, servicer.on_revoke
    instance.add_service(
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        servicer,
        "headrace.reward.v1.RewardService",
    )
    return runs.close_all


if __name__ == "__main__":
    main()
