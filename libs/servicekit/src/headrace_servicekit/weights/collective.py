"""A version to all hosts at once, over a process group that lives as long as the broadcast: both of its sides.

Receivers ask the source for a seat. It waits a moment for those that the coordinator told at the same time, and sends.
A member that is lost ends the broadcast for all, each of which goes on with its next transport; so does one that comes
while a broadcast runs. Knows no torch: `Groups` is its part.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tls import tls_dir
from headrace_servicekit.weights.arrivals import CHUNK_BYTES, Arrival
from headrace_servicekit.weights.pulling import unavailable
from headrace_servicekit.weights.store import StoredWeights, WeightStore
from headrace_servicekit.weights.transports import Attempt, Found, Links, Wanted, refuse_withheld

GATHER_S = 1.0
"""How long a broadcast waits for the receivers that are expected, from the first one on."""
SEAT_S = 10.0
PIECE_S = 40.0
"""Longer than a process group's own waits: what never returns from them, as from a stopped process, is left behind."""
LAST_S = 10.0
"""From the end of the source's part to the last piece here."""
_Made = TypeVar("_Made")


class Group(Protocol):
    """A process group of one broadcast; see headrace_modelkit.broadcasting. Its calls block, and raise RuntimeError."""

    def send(self, body: memoryview, goes_on: Callable[[int], bool]) -> None: ...

    def receive(self, size: int) -> Iterator[memoryview]: ...


class Groups(Protocol):
    """What makes process groups."""

    def device_id(self) -> str: ...

    def serve(self, host: str) -> tuple[int, Any]: ...

    def join(
        self, host: str, port: int, key: str, rank: int, size: int, backend: str, own_host: str
    ) -> Group: ...


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
    reached: int = 0
    lost: str = ""

    def goes_on(self, end: int) -> bool:
        """Asked by the sending thread before it sends up to `end`."""
        self.reached = end
        return not self.lost

    def leave(self, member: _Member) -> None:
        """A member is gone. One that has all of it may go: the sender is in the last bucket then."""
        if member not in self.members:
            return
        if not self.begun:
            self.members.remove(member)
        elif self.reached < len(self.stored.body):
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
        """A seat, and the stream's end with that of the broadcast. Raises ServiceError NOT_FOUND, LATE, UNAVAILABLE."""
        key = request.run, request.number
        stored = self._store.get(*key)
        broadcast = self._open.get(key)
        if broadcast is None:
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
            del self._open[key]

    async def _send(self, broadcast: _Broadcast) -> None:
        host, _ = split_address(self._store.address)
        devices = [self._groups.device_id(), *(member.request.device for member in broadcast.members)]
        nccl = all(devices) and len(set(devices)) == len(devices)
        port, store = self._groups.serve(host)
        seat = weights_pb2.JoinBroadcastResponse(
            host=host, port=port, key=secrets.token_hex(16), size=len(devices)
        )
        seat.backend = "nccl" if nccl else "gloo"
        for rank, member in enumerate(broadcast.members, 1):
            seat.rank = rank
            given = weights_pb2.JoinBroadcastResponse()
            given.CopyFrom(seat)
            member.seat.set_result(given)

        def send() -> None:
            group = self._groups.join(host, port, seat.key, 0, seat.size, seat.backend, host)
            group.send(broadcast.stored.body, broadcast.goes_on)

        await beside(send)
        del store


def _why_not() -> str:
    return "process groups have no encryption, and the fleet runs with --tls" if tls_dir() else ""


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


class Collective:
    """Broadcast by a process group: NCCL where each member has a GPU of its own, else Gloo."""

    name = "collective"
    kind = common_pb2.WEIGHT_TRANSPORT_COLLECTIVE
    local = False

    def __init__(self, groups: Groups, links: Links) -> None:
        self._groups, self._links = groups, links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where the source broadcasts. Raises ServiceError WITHHELD with its reason where it cannot."""
        refuse_withheld(self.kind, source)
        return self.kind in source.transports

    async def take(
        self,
        store: WeightStore,
        wanted: Wanted,
        sources: Sequence[common_pb2.WeightSource],
        attempt: Attempt,
    ) -> Found | None:
        """Takes part in the broadcast of the first source that gives a seat, and verifies what comes."""
        for source in sources:
            with attempt.noting(self.name, source):
                return await self._join(store, wanted, source, attempt)
        return None

    def took(self, wanted: Wanted, seconds: float) -> None:
        """Measures the way: a whole body came."""
        self._links.took(wanted.manifest.size_bytes, seconds, changes=False)

    async def _join(
        self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource, attempt: Attempt
    ) -> Found:
        own_host, _ = split_address(store.address or "127.0.0.1:0")
        request = weights_pb2.JoinBroadcastRequest(
            run=wanted.run,
            number=wanted.version.number,
            host=own_host,
            device=self._groups.device_id(),
            receivers=source.receivers,
        )
        async with dial(source.address, token=attempt.token) as channel:
            stub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
            call: Any = stub.JoinBroadcast(request)
            try:
                async with asyncio.timeout(SEAT_S):
                    seat = await call.read()
                if not isinstance(seat, weights_pb2.JoinBroadcastResponse):  # grpc.aio.EOF
                    raise unavailable(f"{source.address} gave no seat")
                return await self._fill(store, wanted, seat, own_host, call, attempt)
            except TimeoutError as error:
                raise unavailable(f"{source.address}: the broadcast stands still") from error
            except grpc.aio.AioRpcError as error:
                raise unavailable(f"{source.address}: {message_of(error)}") from error
            except (RuntimeError, OSError) as error:
                raise unavailable(f"the broadcast of {source.address} failed: {error}") from error
            finally:
                call.cancel()

    async def _fill(
        self,
        store: WeightStore,
        wanted: Wanted,
        seat: weights_pb2.JoinBroadcastResponse,
        own_host: str,
        call: Any,
        attempt: Attempt,
    ) -> Found:
        """The body's pieces into the store. The end of the call before theirs is the end of the broadcast."""
        manifest = wanted.manifest
        layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
        pending = store.begin(wanted.run, wanted.version.number, layout)
        arrival = Arrival(pending.whole(), manifest.entries)
        ended = asyncio.ensure_future(call.read())

        def pieces() -> Iterator[memoryview]:
            where = seat.host, seat.port, seat.key, seat.rank, seat.size, seat.backend
            yield from self._groups.join(*where, own_host).receive(arrival.size)

        async def arrive() -> None:
            found = pieces()
            coming = asyncio.ensure_future(beside(lambda: next(found, None)))
            try:
                while True:
                    async with asyncio.timeout(PIECE_S):
                        piece = await coming
                    if piece is None:
                        return
                    coming = asyncio.ensure_future(beside(lambda: next(found, None)))
                    for start in range(0, len(piece), CHUNK_BYTES):
                        arrival.add(piece[start : start + CHUNK_BYTES])
                    attempt.turn.goes_on()
            finally:
                coming.cancel()

        arriving = asyncio.ensure_future(arrive())
        try:
            with store.arrives(wanted.run, wanted.version.number, arrival):
                await asyncio.wait({arriving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    ended.result()
                    async with asyncio.timeout(LAST_S):
                        await arriving
                arriving.result()
            return pending.publish(wanted.version, manifest), arrival.moved
        except BaseException:
            pending.discard()
            raise
        finally:
            for task in (arriving, ended):
                task.cancel()


async def beside(act: Callable[[], _Made]) -> _Made:
    """What `act` returns, on a thread that keeps neither loop nor process: a process group may never come back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Made] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, problem = None, None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - it is handed to whoever waits
            problem = error
        with suppress(RuntimeError):  # The loop is closed: nobody waits.
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return await done
