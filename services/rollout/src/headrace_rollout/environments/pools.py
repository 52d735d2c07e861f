"""The pools of a run, and how long and how often their environments were asked. Knows no stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.memory.blobs import BlobReader

from headrace_rollout.engines.figures import BusyTime
from headrace_rollout.environments.pool import Pool
from headrace_rollout.wire import check_pools, duration_of


class Pools:
    """The pools of a run, which are used from stream to stream: steps are counted for as long as a pool lives."""

    def __init__(self, blobs: BlobReader, token: str | None, step_timeout_s: float) -> None:
        self.asked = BusyTime()
        """Times in which some environment was asked to do something."""
        self.operations: Counter[str] = Counter()
        """What they were asked, by the way that it went: `socket` of the host, or `grpc`."""
        self._blobs, self._token, self._step_timeout_s = blobs, token, step_timeout_s
        self._pools: dict[tuple[str, str, str], Pool] = {}

    def of(self, messages: Sequence[rollout_pb2.EnvironmentPool]) -> list[Pool]:
        """The pools that a stream's opening names, under the authority that it gives. Raises ServiceError INVALID."""
        check_pools(messages)
        found = []
        for message in messages:
            key = (message.address, message.pool, message.pool_incarnation)
            if key not in self._pools:
                self._pools[key] = Pool(
                    message, self._token, self._blobs, self._step_timeout_s, self.asked, self.operations
                )
            self._pools[key].under(message.header)
            found.append(self._pools[key])
        return found

    async def close(self) -> None:
        """Ends all streams; pools stay open at their simulators."""
        for pool in self._pools.values():
            await pool.close()
        await self._blobs.close()


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
