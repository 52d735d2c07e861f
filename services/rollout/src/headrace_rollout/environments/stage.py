"""The times in environments that a stream reports. Knows no stream."""

from __future__ import annotations

from typing import Any

from headrace_rollout.environments.pools import Pools
from headrace_rollout.wire import duration_of


class SimulateStage:
    """The stage `simulate` as a stream tells it, with each of its messages."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._told_s, self._told = pools.asked.seconds, pools.operations.copy()

    def tell(self, stages: Any) -> None:
        """Adds what was asked of the run's environments since the message before."""
        seconds, operations = self._pools.asked.seconds, self._pools.operations.copy()
        stage = stages.add(stage="simulate", wall_time=duration_of(seconds - self._told_s))
        for way, count in (operations - self._told).items():
            stage.values[f"operations_by_{way}"] = count
        self._told_s, self._told = seconds, operations
