"""Makes the calls of a recording again, in their order: no request goes out before what was answered before it is
answered again. So a service gets the same work together, whatever it takes in the meantime.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from headrace_servicekit.recording.files import Call, Recording
from headrace_servicekit.rpc.errors import message_of, reason_of

from headrace_cli.errors import CommandError
from headrace_cli.replaying.calls import Calls, Method, method_of
from headrace_cli.replaying.results import Values, answered, asked, merged, only, results
from headrace_cli.replaying.stage import DAY_S, Member, Stage

REQUEST, RESPONSE, END = range(3)
BEGINNINGS = {"OpenRun", "JoinTrainerGroup", "Restore", "InstallPolicy"}
"""Calls without which nothing is left to compare."""


@dataclass(frozen=True)
class Replayed:
    """What the recorded calls have led to, and what they lead to here."""

    recorded: Values
    replayed: Values
    calls: int


def replay(
    recording: Recording,
    kind: str,
    *,
    checkpoint: Path | None = None,
    model: str = "",
    debug: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Replayed:
    """Starts the service, makes its calls again, and stops it. `say` hears which step is at work.

    Raises CommandError: exit code 2 where the recording or this host lacks what the calls need, 1 where the service
    ends or refuses what it once took.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
        directory = Path(folder)
        calls = Calls(recording, kind, directory, checkpoint, model)
        return asyncio.run(_replay(recording, kind, calls, directory, debug, say))


async def _replay(
    recording: Recording, kind: str, calls: Calls, directory: Path, debug: bool, say: Callable[[str], None]
) -> Replayed:
    known = {each.incarnation: len(each.devices) for each in recording.header.instances}
    counts = [known.get(incarnation, 1) for incarnation in calls.incarnations]
    async with Stage(kind, directory, counts, calls.epoch, debug=debug) as stage:
        members = dict(zip(calls.incarnations, stage.members, strict=True))
        made = [_Made(call, calls, stage, members[call.incarnation]) for call in calls.all]
        step = 0
        for _, what, each, index in sorted(_events(made), key=lambda event: event[:2]):
            if each.call.step > step:
                step = each.call.step
                say(f"step {step}")
            await each.go(what, index)
    recorded = merged(each.values(each.recorded, each.call.reason) for each in made)
    replayed = merged(each.values(each.responses, each.reason) for each in made)
    return Replayed(recorded, replayed, len(made))


def _events(made: list[_Made]) -> list[tuple[int, int, _Made, int]]:
    """Place, what happened there, in which call, and with which of its messages."""
    found = []
    for each in made:
        for index, message in enumerate(each.call.messages):
            found.append((message.place, REQUEST if message.is_request else RESPONSE, each, index))
        if each.call.ended_at is not None:
            found.append((each.call.end_place, END, each, -1))
    return found


class _Made:
    """One call that is made again."""

    def __init__(self, call: Call, calls: Calls, stage: Stage, member: Member) -> None:
        self.call = call
        self.responses: list[Any] = []
        self.reason = ""
        self._calls, self._stage, self._member = calls, stage, member
        self._method: Method = method_of(call.kind, call.method)
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._left = sum(message.is_request for message in call.messages)
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._asked: set[str] = set()
        self._answered: set[str] = set()

    def values(self, responses: list[Any], reason: str) -> Values:
        """What the call has led to. Of a stream that goes on behind the recording: what was answered in it."""
        found = results(self.call.kind, self.call, responses, reason)
        if not self._method.is_stream or reason:
            return found if self.call.ended_at is not None else {}
        names = self._asked
        if self.call.ended_at is None:
            names = names & set().union(*map(answered, self.recorded))
        return only(found, names)

    @property
    def recorded(self) -> list[Any]:
        """The recorded responses."""
        return [
            self._method.response.FromString(each.data) for each in self.call.messages if not each.is_request
        ]

    async def go(self, what: int, index: int) -> None:
        """Does what happened at one place, as far as this side does it, and waits for the other's part."""
        if what == REQUEST:
            self._left -= 1
            self._ask(self._calls.changed(self.call, self.call.messages[index].data))
        elif what == RESPONSE and self._method.is_stream:
            wanted = answered(self._method.response.FromString(self.call.messages[index].data))
            await self._stage.unless_ended(self._member, self._until(wanted))
        elif self._task is not None:
            await self._stage.unless_ended(self._member, asyncio.shield(self._task))
            self._check()

    def _ask(self, request: Any) -> None:
        if not self._method.is_stream:
            self._task = asyncio.create_task(self._unary(request))
            return
        self._asked |= asked(request)
        self._requests.put_nowait(request)
        if not self._left:
            self._requests.put_nowait(None)
        if self._task is None:
            self._task = asyncio.create_task(self._stream())

    async def _until(self, wanted: set[str]) -> None:
        while not wanted & self._asked <= self._answered and self._task is not None and not self._task.done():
            self._news.clear()
            await self._news.wait()

    async def _unary(self, request: Any) -> None:
        method = self._method
        call = self._member.channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            self.responses.append(await call(request, timeout=DAY_S))
        except grpc.aio.AioRpcError as error:
            self._refused(error)

    async def _stream(self) -> None:
        method = self._method
        call = self._member.channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(self._sent())
        try:
            async for response in call:
                self.responses.append(response)
                self._answered |= answered(response)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self._refused(error)
        finally:
            self._news.set()

    async def _sent(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request

    def _refused(self, error: grpc.aio.AioRpcError) -> None:
        self.reason = reason_of(error) or error.code().name
        self._why = message_of(error)

    def _check(self) -> None:
        """Raises CommandError for a refusal that is of this host and not of the step."""
        if self.reason and self.call.method in BEGINNINGS and not self.call.reason:
            fix = "; name it on this machine with --model" if self.reason == "MODEL_NOT_READABLE" else ""
            raise CommandError(
                f"{self._member.name} refused {self.call.method}: {self._why}{fix}", reason=self.reason
            )
