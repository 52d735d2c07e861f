"""What a driver is: it makes the trajectories that a Generate stream is asked for. And that of prompts.

A prompt has a single answer: the engine's own samples are its trajectories, and no session stands between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.engines.samples import Finish, Group, Prefix, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.environments.pool import Pool
from headrace_rollout.moving import MovedCaches
from headrace_rollout.wire import groups_of

if TYPE_CHECKING:
    from headrace_rollout.runs.opened import TextRun

WAITING_SAMPLES = 4096
"""Samples without a row, beyond which a stream's next assignment waits."""
_POLL_S = 0.02
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


class PromptDriver:
    """The answers to one stream's prompts."""

    def __init__(
        self, run: TextRun, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put, caches: MovedCaches
    ) -> None:
        self._engine, self._codec = run.engine, run.codec
        self._stream, self._put = stream, put
        self._caches = caches if run.engine.capabilities.resume_from_cache else None
        self._longest = None if opening.evaluation else run.config.longest_prompt

    async def read(self, groups: Sequence[rollout_pb2.GroupAssignment]) -> Sequence[Group]:
        """Groups with their prompts as ids. Raises INVALID."""
        found = await groups_of(groups, self._codec, self._caches)
        # Not reading the next assignment slows the caller through the stream's flow control.
        while self._engine.waiting_samples > WAITING_SAMPLES:  # noqa: ASYNC110  # counted in a thread
            await asyncio.sleep(_POLL_S)
        return found

    async def begin(self, assigned: Sequence[Group]) -> None:
        """Asks the engine for them; a prompt that is longer than the run wants comes back at once."""
        if self._longest is not None:
            long = [group for group in assigned if len(group.prompt_ids) > self._longest]
            assigned = [group for group in assigned if len(group.prompt_ids) <= self._longest]
            if long:
                self._put([*self._too_long(long)])
        await self._engine.submit(self._stream, assigned)

    async def abort(self) -> None:
        """Stops all samples."""
        await self._engine.abort(None, stream=self._stream)

    async def close(self) -> None:
        """Stops all samples."""
        await self.abort()

    def tell(self, response: rollout_pb2.GenerateResponse) -> None:
        """Adds nothing."""

    def _too_long(self, groups: Sequence[Group]) -> Iterator[TrajectoryUpdate]:
        """The ends of samples that no engine sees."""
        for group in groups:
            for sample in group.samples:
                yield TrajectoryUpdate(
                    SlotKey(group.prompt_ordinal, sample.sample_index),
                    sample.attempt,
                    0,
                    [],
                    [],
                    self._stream.policy_number,
                    group.prompt_ids,
                    Finish.PROMPT_TOO_LONG,
                    whole=Prefix([], [], []),
                    images=group.images,
                )
