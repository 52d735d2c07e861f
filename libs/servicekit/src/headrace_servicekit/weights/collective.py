"""A version to all hosts at once, over a process group that lives as long as the broadcast: a receiver's side.

It asks the source for a seat, and goes on with its next transport where it gets none, or another member is lost. Knows
no torch: `Groups` is its part.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from typing_extensions import override

from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.weights.arrivals import Arrival
from headrace_servicekit.weights.versions import StoredWeights, unavailable
from headrace_servicekit.weights.ways import Attempt, Found, Links, Way

SEAT_S = 10.0
PIECE_S = 40.0
"""Longer than a process group's own waits: what never returns from them, as from a stopped process, is left behind."""
LAST_S = 10.0
"""From the end of the source's part to the last piece here."""
_Made = TypeVar("_Made")


class Group(Protocol):
    """A process group of one broadcast; see headrace_modelkit.broadcasting. Its calls block, and raise RuntimeError."""

    @property
    def bucket(self) -> int: ...

    def send(self, pieces: Iterable[memoryview | bytes]) -> None: ...

    def receive(self) -> Iterator[memoryview]: ...


class Groups(Protocol):
    """What makes process groups."""

    def device_id(self) -> str: ...

    def serve(self, host: str) -> tuple[int, Any]: ...

    def join(
        self, host: str, port: int, key: str, rank: int, size: int, backend: str, own_host: str
    ) -> Group: ...


class Collective(Way):
    """Broadcast by a process group: NCCL where each member has a GPU of its own, else Gloo.

    `changes`: of what has changed, where all members hold the version before; where these are lost, of the whole.
    """

    name = "collective"
    kind = common_pb2.WEIGHT_TRANSPORT_COLLECTIVE

    def __init__(self, groups: Groups, links: Links, *, changes: bool = False) -> None:
        self._groups, self.links, self._of_changes = groups, links, changes

    @override
    async def take_from(self, source: common_pb2.WeightSource, attempt: Attempt) -> Found | None:
        """Takes part in a broadcast, and verifies what comes."""
        kept = await asyncio.to_thread(attempt.kept)
        if len(kept) == len(attempt.manifest.entries):
            return await attempt.fill(_nothing, kept)  # A broadcast of nothing is none.
        own_host, _ = split_address(attempt.store.address or "127.0.0.1:0")
        request = weights_pb2.JoinBroadcastRequest(
            run=attempt.run,
            number=attempt.version.number,
            host=own_host,
            device=self._groups.device_id(),
            receivers=source.receivers,
            held=kept,
        )
        changes = self._of_changes and self.links is not None and self.links.wants_changes()
        base = attempt.base(source) if changes else None
        for wanted in (base, None) if base is not None else (None,):
            request.base_digest = wanted.version.digest if wanted is not None else ""
            async with _seat(source, request, attempt.token) as (seat, call):
                pour = partial(self._pour, wanted, seat, call, attempt, own_host)
                if not seat.base_digest:
                    return await attempt.fill(pour, {each: kept[each] for each in seat.held if each in kept})
                with attempt.noting("delta over collective", source), _told(source):
                    return await attempt.fill(pour, {})
        raise AssertionError("the last try is of the whole")

    async def _pour(
        self,
        base: StoredWeights | None,
        seat: weights_pb2.JoinBroadcastResponse,
        call: Any,
        attempt: Attempt,
        own_host: str,
        arrival: Arrival,
    ) -> bool:
        """Adds all pieces. The end of the call before theirs is the end of the broadcast."""
        if base is not None and seat.base_digest:
            arrival.restart(base)

        def pieces() -> Iterator[memoryview]:
            where = seat.host, seat.port, seat.key, seat.rank, seat.size, seat.backend
            yield from self._groups.join(*where, own_host).receive()

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
                    await _add(arrival, piece)
                    attempt.turn.goes_on()
            finally:
                coming.cancel()

        arriving, ended = asyncio.ensure_future(arrive()), asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({arriving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                ended.result()
                async with asyncio.timeout(LAST_S):
                    await arriving
            arriving.result()
        finally:
            arriving.cancel()
            ended.cancel()
            await asyncio.wait({arriving, ended})  # Nothing is written to the body after this.
        return True


async def _add(arrival: Arrival, piece: memoryview) -> None:
    """Adds a piece of a broadcast: bytes, or a response with changes."""
    if arrival.base is not None:
        try:
            response = weights_pb2.FetchWeightsResponse.FromString(bytes(piece))
        except DecodeError as error:
            raise unavailable(f"changes that cannot be read at byte {arrival.offset}") from error
        await arrival.change(response)
        return
    if arrival.offset + len(piece) > arrival.size:
        raise unavailable(f"the broadcast goes beyond byte {arrival.size}")
    await arrival.add(piece)


async def _nothing(arrival: Arrival) -> bool:
    """Adds nothing to a version of which all tensors are held."""
    return True


@asynccontextmanager
async def _seat(
    source: common_pb2.WeightSource, request: weights_pb2.JoinBroadcastRequest, token: str | None
) -> AsyncIterator[tuple[weights_pb2.JoinBroadcastResponse, Any]]:
    """A seat in a broadcast, which is left at the end, and the call that ends with the broadcast."""
    with _told(source):
        async with dial(source.address, token=token) as channel:
            stub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
            call: Any = stub.JoinBroadcast(request)
            try:
                async with asyncio.timeout(SEAT_S):
                    seat = await call.read()
                if not isinstance(seat, weights_pb2.JoinBroadcastResponse):  # grpc.aio.EOF
                    raise unavailable(f"{source.address} gave no seat")
                yield seat, call
            finally:
                call.cancel()


@contextmanager
def _told(source: common_pb2.WeightSource) -> Iterator[None]:
    """What goes wrong in a broadcast, as ServiceError."""
    try:
        yield
    except TimeoutError as error:
        raise unavailable(f"{source.address}: the broadcast stands still") from error
    except grpc.aio.AioRpcError as error:
        raise unavailable(f"{source.address}: {message_of(error)}") from error
    except (RuntimeError, OSError) as error:
        raise unavailable(f"the broadcast of {source.address} failed: {error}") from error


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
