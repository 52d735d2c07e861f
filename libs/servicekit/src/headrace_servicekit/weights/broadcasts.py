"""A version to all hosts at once, over a process group that lives as long as the broadcast: the source's side.

Receivers ask for a seat. The source waits a moment for those that the coordinator told at the same time, and sends: the
whole, or what has changed where all of them hold the version before. A member that is lost ends the broadcast for all,
each of which goes on with its next transport; so does one that comes while a broadcast runs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
from headrace.common.v1 import weights_pb2

from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tls import encrypts_all
from headrace_servicekit.weights.arrivals import lacking
from headrace_servicekit.weights.collective import LAST_S, PIECE_S, Collective, Groups, beside
from headrace_servicekit.weights.delta import Changes
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import StoredWeights, unavailable

GATHER_S = 1.0
"""How long a broadcast waits for the receivers that are expected, from the first one on."""


@dataclass(eq=False)
class _Member:
    request: weights_pb2.JoinBroadcastRequest
    seat: asyncio.Future[weights_pb2.JoinBroadcastResponse]


@dataclass(eq=False)
class _Broadcast:
    """One version's: its members, who leave until it begins, and how far it is."""

    stored: StoredWeights
    over: asyncio.Future[None]
    members: list[_Member] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    left: bool = False
    """A member is gone, so that another broadcast may begin: it has all of it, or what it got was wrong."""
    held: set[int] = field(default_factory=set)
    """Tensors that all members hold, by their place in the manifest."""
    reached: int = 0
    lost: str = ""

    def goes_on(self, end: int) -> None:
        """Called by the sending thread before it sends up to `end`. Raises RuntimeError where it should not."""
        self.reached = end
        if self.lost:
            raise RuntimeError("the broadcast was ended")

    def whole(self, bucket: int) -> Iterator[memoryview]:
        """The body, without what all members hold."""
        body = self.stored.body
        stretches = lacking(self.stored.manifest.entries, self.held)
        starts = [(start, end) for begin, end in stretches for start in range(begin, end, bucket)]
        reached = [*(start for start, _ in starts[1:]), len(body)]
        for (start, end), by in zip(starts, reached, strict=False):
            self.goes_on(by)
            yield body[start : min(start + bucket, end)]
        self.goes_on(len(body))

    def coded(self, changes: Changes, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        """What has changed, for another thread than the loop's; the next stretches are coded meanwhile."""
        offsets = changes.offsets
        for offset, end in zip(offsets, [*offsets[1:], len(self.stored.body)], strict=True):
            response = asyncio.run_coroutine_threadsafe(changes.response(offset), loop).result(PIECE_S)
            self.goes_on(end)
            yield response.SerializeToString()

    def leave(self, member: _Member) -> None:
        """A member is gone. One that has all of it may go: the sender is in the last bucket then."""
        self.members.remove(member)
        self.left = self.begun
        if self.begun and self.reached < len(self.stored.body):
            self.lost = f"{member.request.host} left by byte {self.reached} of {len(self.stored.body)}"
            if not self.over.done():
                self.over.set_exception(unavailable(f"the broadcast has lost a member: {self.lost}"))


class BroadcastSource:
    """The broadcasts of a store's versions."""

    def __init__(self, store: WeightStore, groups: Groups) -> None:
        self._store, self._groups = store, groups
        store.ways[Collective.kind] = _why_not
        self._open: dict[tuple[str, int], _Broadcast] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(
        self, request: weights_pb2.JoinBroadcastRequest
    ) -> AsyncIterator[weights_pb2.JoinBroadcastResponse]:
        """A seat, and the stream's end with that of the broadcast.

        Raises ServiceError NOT_FOUND, INVALID, LATE, UNAVAILABLE.
        """
        key = request.run, request.number
        stored = self._store.get(*key)
        lacking(stored.manifest.entries, request.held)
        broadcast = self._open.get(key)
        if broadcast is None or broadcast.left:
            broadcast = self._open[key] = _Broadcast(stored, asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._cast(key, broadcast))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif broadcast.begun:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "LATE",
                f"a broadcast of version {request.number} runs already, up to byte {broadcast.reached}",
            )
        member = _Member(request, asyncio.get_running_loop().create_future())
        broadcast.members.append(member)
        broadcast.more.set()
        try:
            yield await member.seat
            await asyncio.shield(broadcast.over)
        finally:
            broadcast.leave(member)

    async def _cast(self, key: tuple[str, int], broadcast: _Broadcast) -> None:
        over = broadcast.over
        over.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # It may be nobody's affair.
        try:
            await _gathered(broadcast)
            broadcast.begun = True
            if broadcast.members:
                await self._send(broadcast)
            if not over.done():
                over.set_result(None)
        except (RuntimeError, OSError) as error:
            if not over.done():
                over.set_exception(unavailable(f"the broadcast failed by byte {broadcast.reached}: {error}"))
        finally:
            over.cancel()
            for member in broadcast.members:
                member.seat.cancel()
            if self._open.get(key) is broadcast:
                del self._open[key]

    async def _send(self, broadcast: _Broadcast) -> None:
        host, _ = split_address(self._store.address)
        devices = [self._groups.device_id(), *(member.request.device for member in broadcast.members)]
        nccl = all(devices) and len(set(devices)) == len(devices)
        port, store = self._groups.serve(self._store.listen or host)
        seat = weights_pb2.JoinBroadcastResponse(
            host=host, port=port, key=secrets.token_hex(16), size=len(devices)
        )
        seat.backend = "nccl" if nccl else "gloo"
        changes = self._changes(broadcast)
        if changes is not None:
            seat.base_digest = changes.base_digest
        else:
            broadcast.held = set.intersection(*(set(member.request.held) for member in broadcast.members))
            seat.held.extend(sorted(broadcast.held))
        for rank, member in enumerate(broadcast.members, 1):
            seat.rank = rank
            given = weights_pb2.JoinBroadcastResponse()
            given.CopyFrom(seat)
            member.seat.set_result(given)

        loop = asyncio.get_running_loop()

        def send() -> None:
            group = self._groups.join(host, port, seat.key, 0, seat.size, seat.backend, host)
            if changes is None:
                group.send(broadcast.whole(group.bucket))
            else:
                group.send(broadcast.coded(changes, loop))

        await beside(send)
        # What is small may all be sent before the last members have met: the store stays for them.
        loop.call_later(LAST_S, lambda kept: None, store)

    def _changes(self, broadcast: _Broadcast) -> Changes | None:
        """What has changed against the version that all members hold; None where one wants the whole."""
        first, *others = {member.request.base_digest for member in broadcast.members}
        request = broadcast.members[0].request
        if not first or others:
            return None
        try:
            return self._store.changes(request.run, request.number, first)
        except ServiceError:  # It is held no more.
            return None


def _why_not() -> str:
    return "process groups have no encryption, and the fleet runs with --tls" if encrypts_all() else ""


async def _gathered(broadcast: _Broadcast) -> None:
    """Returns when all that are expected are there, or after GATHER_S."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GATHER_S):
            while True:
                await broadcast.more.wait()
                broadcast.more.clear()
                expected = max((each.request.receivers for each in broadcast.members), default=0)
                if 0 < expected <= len(broadcast.members):
                    return
