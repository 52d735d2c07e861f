"""Changes the number of processes of a kind through the supervisor that can.

Each Idempotency-Key sends one command. Does not know what a host can hold: its supervisor decides that.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from headrace_schema.problems import problem

from headrace_coordinator.api.control import Refused
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import Supervisor

ANSWER_S = 30.0
"""How long a supervisor may take to check and accept a number; the processes are not waited for."""


class Scaling:
    """Scale commands in flight. `known(key, body)` names what a key made; it raises `Refused` for another body."""

    def __init__(self, fleet: Fleet, known: Callable[[str, str], str]) -> None:
        self._fleet = fleet
        self._known = known
        self._in_flight: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._answers: dict[str, asyncio.Future[str]] = {}

    async def scale(self, kind: str, count: int, key: str) -> int:
        """Returns `count` once the supervisor has accepted it and the key is durable.

        A repeated key gets the answer of its first command, also while that one is in flight.

        Raises:
            Refused: UNAVAILABLE without a supervisor or its answer; INVALID with the supervisor's reason;
                CONFLICT for a key of another request.
        """
        body = f"scale {kind}={count}"
        if self._known(key, body):
            return count
        used_for, command = self._in_flight.get(key, (body, None))
        if used_for != body:
            raise Refused("CONFLICT", f"Idempotency-Key {key} was used for another request; use a new key")
        if command is None:
            command = asyncio.create_task(self._command(kind, count, key, body), name=body)
            self._in_flight[key] = body, command
            command.add_done_callback(lambda _: self._in_flight.pop(key))
        await asyncio.shield(command)  # another request with this key may wait for the same command
        return count

    async def _command(self, kind: str, count: int, key: str, body: str) -> None:
        supervisor = self._supervisor_of(kind)
        if error := await self._ask(supervisor, kind, count):
            fix = "ask for a number that the host can hold"
            raise Refused("INVALID", error, [problem("count", error, fix)])
        event_log = self._fleet.event_log
        await event_log.commit(
            ev.KeyUsed(at=event_log.now(), key=key, body=body, resource=f"services/{kind}")
        )

    def _supervisor_of(self, kind: str) -> Supervisor:
        for supervisor in self._fleet.supervisors.values():
            if kind in supervisor.scalable:
                return supervisor
        raise Refused("UNAVAILABLE", f"no connected supervisor can change the number of {kind} processes")

    async def _ask(self, supervisor: Supervisor, kind: str, count: int) -> str:
        """Why the supervisor refuses, or empty."""
        request = uuid.uuid4().hex
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        supervisor.send("scale", (request, kind, count))
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError as error:
            waited = (
                f"waited {ANSWER_S:.0f} s for the supervisor of {supervisor.host} to accept {kind}={count}"
            )
            raise Refused("UNAVAILABLE", waited) from error
        finally:
            del self._answers[request]

    def answered(self, request: str, error: str) -> None:
        """A supervisor answered a command; empty `error`: it accepted."""
        answer = self._answers.get(request)
        if answer is not None and not answer.done():
            answer.set_result(error)
