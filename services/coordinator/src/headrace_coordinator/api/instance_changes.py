"""What a user changes of the fleet: takes an instance out of use, sets the number of processes of a kind.

Does not know what a host can hold: its supervisor decides that.
"""

from __future__ import annotations

import asyncio
import uuid

from headrace_schema.problems import choose, nearest, problem

from headrace_coordinator.api.idempotency import Keys, conflict, digest
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import Supervisor

ANSWER_S = 30.0
"""How long a supervisor may take to check and accept a number; the processes are not waited for."""


class InstanceChanges:
    """Each Idempotency-Key sends one command."""

    def __init__(self, fleet: Fleet, keys: Keys) -> None:
        self._fleet = fleet
        self._keys = keys
        self._in_flight: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By key: what is asked for, and the command to the supervisor."""
        self._answers: dict[str, asyncio.Future[str]] = {}

    async def drain(self, name: str, idempotency_key: str) -> str:
        """Takes an instance out of use in order; its process then ends. Returns its incarnation.

        The key is recorded with the incarnation: a later process of the name is another.

        Raises:
            Refused: NOT_FOUND, naming the nearest instance; UNAVAILABLE for one that is not connected.
        """
        body = digest(["drain", name])
        async with self._keys.held(idempotency_key):
            incarnation = self._keys.made(idempotency_key, body)
            if not incarnation:
                incarnation = self._drainable(name)
                used = self._keys.used(idempotency_key, body, incarnation)
                await self._fleet.drain(incarnation, used)
        return incarnation

    def _drainable(self, name: str) -> str:
        """The incarnation of a connected instance."""
        instances = self._fleet.event_log.state.instances.values()
        known = [i.incarnation for i in instances if i.instance == name]
        if not known:
            close = nearest(name, {i.instance for i in instances})
            message = f"there is no instance {name[:40]!r}" + (f"; did you mean {close}?" if close else "")
            raise Refused("NOT_FOUND", message)
        alive = [incarnation for incarnation in known if self._fleet.alive(incarnation)]
        if not alive:
            raise Refused("UNAVAILABLE", f"{name} is not connected: it cannot be told to drain; try again")
        return alive[-1]

    async def scale(self, kind: str, count: int, key: str, host: str = "") -> int:
        """Returns `count` once the supervisor of a host has accepted it and the key is durable.

        `host` may be left out where one alone can change the number.

        A repeated key gets the answer of its first command, also while that one is in flight.

        Raises:
            Refused: UNAVAILABLE without a supervisor or its answer; INVALID with the supervisor's reason, or for a
                host that there is not; CONFLICT for a key of another request.
        """
        body = f"scale {kind}={count}" + (f" on {host}" if host else "")
        if self._keys.made(key, body):
            return count
        used_for, command = self._in_flight.get(key, (body, None))
        if used_for != body:
            raise conflict(key)
        if command is None:
            command = asyncio.create_task(self._command(kind, count, key, body, host), name=body)
            self._in_flight[key] = body, command
            command.add_done_callback(lambda _: self._in_flight.pop(key))
        await asyncio.shield(command)  # another request with this key may wait for the same command
        return count

    async def _command(self, kind: str, count: int, key: str, body: str, host: str) -> None:
        supervisor = self._supervisor_of(kind, host)
        if error := await self._ask(supervisor, kind, count):
            fix = "ask for a number that the host can hold"
            raise Refused("INVALID", error, [problem("count", error, fix)])
        await self._fleet.event_log.commit(self._keys.used(key, body, f"services/{kind}"))

    def _supervisor_of(self, kind: str, host: str) -> Supervisor:
        able = {each.host: each for each in self._fleet.supervisors.values() if kind in each.scalable}
        if not able:
            raise Refused("UNAVAILABLE", f"no connected supervisor can change the number of {kind} processes")
        if host in able or (len(able) == 1 and not host):
            return able[host or next(iter(able))]
        hosts = ", ".join(sorted(able))
        reason = (
            f"there is no host {host[:40]!r}; there are {hosts}"
            if host
            else f"several hosts run {kind} processes: say which ({hosts})"
        )
        raise Refused("INVALID", f"host: {reason}", [problem("host", reason, choose(host, able))])

    async def _ask(self, supervisor: Supervisor, kind: str, count: int) -> str:
        """Why the supervisor refuses, or empty."""
        request = uuid.uuid4().hex
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        supervisor.send("scale", (request, kind, count))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
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
