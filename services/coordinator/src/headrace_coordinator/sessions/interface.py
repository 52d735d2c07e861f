"""What a session run offers to whoever speaks for its loop: HTTP, gRPC, and the protocols of others' clients.

Calls and results are `headrace_schema.sessions`. Every method that refuses raises `api.refusal.Refused`, whose reason
is INVALID (key and fix in `problems`), NOT_FOUND, CONFLICT or UNAVAILABLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace_schema.sessions import CheckpointView, Operation, Result, Sample, SessionView


class Sessions(Protocol):
    """All session runs of the coordinator; it is `Coordinator.sessions` (`headrace_coordinator.app`)."""

    async def create(self, spec: Mapping[str, Any], idempotency_key: str = "") -> str:
        """Submits a run of `spec`, whose `workflow` is session; returns its id, at once: it may wait in the queue.

        The same key gives the same session. `from_checkpoint: {run: SESSION, checkpoint: NAME}` begins from weights
        and optimizer state that were saved by name.
        """

    def info(self, session: str) -> SessionView:
        """The session as it stands."""

    async def submit(self, session: str, seq: int, operation: Operation) -> str:
        """Accepts call number `seq`, durably, and returns its future.

        Numbers count from 1 over all operations of a session. They are executed in their order, whichever comes first,
        and one waits for those below it. A number that was used returns the future that it has, whatever comes with
        it, and so does one whose call was refused by its result. A call resumes a session that was paused as idle.
        """

    async def sample(self, session: str, request: Sample, key: str = "") -> str:
        """Accepts a request for samples and returns its future; the same `key` returns the same one.

        It is bound to weights now: `latest` means the version that was published when this returns.
        """

    async def result(self, future: str, timeout_s: float) -> Result:
        """The result of a future, or Pending after `timeout_s`. Raises Refused NOT_FOUND for one that is not known.

        A result is kept for as long as the session can be asked for, across restarts of the coordinator; samples
        until the coordinator ends.
        """

    def checkpoints(self, session: str) -> list[CheckpointView]:
        """What was saved by name, oldest first; also of a session that has ended."""

    async def delete_checkpoint(self, session: str, name: str) -> None:
        """Deletes a checkpoint, for ever."""

    async def close(self, session: str) -> None:
        """Ends the session: what was accepted is executed, the last weights are saved, and the run succeeds."""

    def listed(self) -> list[str]:
        """All sessions that have not been deleted, oldest first."""
