"""What a driver is: it makes the trajectories that a Generate stream is asked for. Knows no kind of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.engines.samples import TrajectoryUpdate
from headrace_rollout.environments.pool import Pool

Produced = TrajectoryUpdate | Pool
"""What happened to a sample, or a pool of environments that was lost."""
Put = Callable[[Sequence[Produced] | ServiceError], None]
"""Takes what was produced, in the event loop's thread, or what ends the stream."""


class Driver(Protocol):
    """One of a stream; what it produces is put into the stream's inbox."""

    async def read(self, groups: Sequence[rollout_pb2.GroupAssignment]) -> Sequence[Any]:
        """What was assigned, checked, in order. Raises ServiceError."""

    async def begin(self, assigned: Sequence[Any]) -> None:
        """Begins what was read. Raises Refused."""

    async def abort(self) -> None:
        """Stops all samples, which come back as stopped."""

    async def close(self) -> None:
        """Ends all that was begun; nothing comes back after it."""

    def tell(self, response: rollout_pb2.GenerateResponse) -> None:
        """Adds what there is to say beside trajectories."""
