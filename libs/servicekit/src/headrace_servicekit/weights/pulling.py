"""A version over gRPC: its pieces in order, from one source after the other, each from where the last one ended.
Tensors that the receiver holds are not sent.

Knows nothing of other transports, and of relays only that they say when their host has the version elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of, metadata_of, reason_of
from headrace_servicekit.weights.arrivals import Arrival, Turn
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transports import Attempt, Found, Links, Wanted

WINDOW_BYTES = 8 * 1024 * 1024
IDLE_TIMEOUT_S = 30.0
RELAY_SILENCE_S = 5.0
"""A relay gives a sign of life each second; one that is silent for so long is dead."""
SLOW_S, SLOW_BYTES = 10.0, 10 * 1024 * 1024
"""A relay that moves fewer bytes in that time is slow, and the next source is asked for the rest."""
_FETCH = "/headrace.common.v1.WeightService/FetchWeights"


class WholeBody:
    """Streamed over gRPC in pieces; works everywhere."""

    name = "grpc"
    kind = common_pb2.WEIGHT_TRANSPORT_GRPC

    def __init__(self, links: Links) -> None:
        self.links = links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where the source serves it."""
        return self.kind in source.transports

    async def take(
        self,
        store: WeightStore,
        wanted: Wanted,
        sources: Sequence[common_pb2.WeightSource],
        attempt: Attempt,
    ) -> Found | None:
        """Fetches and verifies it; each source goes on where the one before it ended."""
        return await _pull(store, wanted, sources, attempt)


async def _pull(
    store: WeightStore,
    wanted: Wanted,
    sources: Sequence[common_pb2.WeightSource],
    attempt: Attempt,
) -> Found | None:
    """The version and the bytes that were moved; each source goes on where the one before it ended.

    None where all of them failed, as `attempt` then says.
    """
    run, number, manifest = wanted.run, wanted.version.number, wanted.manifest
    held = await asyncio.to_thread(wanted.kept)
    pending = wanted.begin(store)
    arrival = Arrival(pending.whole(), manifest.entries, held)
    try:
        with wanted.arrives(store, arrival):
            await arrival.copy_held()
            for source in sources:
                with attempt.noting("grpc", source):
                    await _download(arrival, run, number, source, attempt.token, attempt.turn)
                    break
                if attempt.failures[-1].reason == "DIGEST_MISMATCH":
                    arrival.rewind()
            else:
                pending.discard()
                return None
        return Found(pending.publish(wanted.version, manifest), arrival.moved)
    except (ServiceError, asyncio.CancelledError):
        pending.discard()
        raise


async def _download(
    arrival: Arrival,
    run: str,
    number: int,
    source: common_pb2.WeightSource,
    token: str | None,
    turn: Turn,
) -> None:
    """Fills the body from where it is, going on at the offset reached when a stream breaks after it made progress.

    A relay is followed where it says that another instance of its host has the version.
    """
    address, led_on = source.address, False
    request = weights_pb2.FetchWeightsRequest(run=run, number=number, relay=source.relay, held=arrival.held)
    while arrival.offset < arrival.size:
        request.offset_bytes = arrival.offset
        try:
            await _stream(arrival, address, request, token, turn)
        except grpc.aio.AioRpcError as error:
            if source.relay and not led_on and reason_of(error) == "ELSEWHERE":
                address, led_on = metadata_of(error)["address"], True
            elif arrival.offset == request.offset_bytes:
                raise unavailable(f"{address}: {message_of(error)}") from error


async def _stream(
    arrival: Arrival,
    address: str,
    request: weights_pb2.FetchWeightsRequest,
    token: str | None,
    turn: Turn,
) -> None:
    silence_s = RELAY_SILENCE_S if request.relay else IDLE_TIMEOUT_S
    async with dial(address, token=token, window_bytes=WINDOW_BYTES) as channel:
        fetch = channel.unary_stream(
            _FETCH,
            request_serializer=weights_pb2.FetchWeightsRequest.SerializeToString,
            response_deserializer=split_piece,
        )
        call = fetch(request)
        try:
            await _drain_into(arrival, call, turn, silence_s, relay=request.relay)
        except TimeoutError as error:
            raise unavailable(
                f"{address} sent nothing for {silence_s:.0f} s at byte {arrival.offset}"
            ) from error
        finally:
            call.cancel()


Piece = tuple[int, memoryview]


def split_piece(message: bytes) -> Piece:
    """(offset, data) of a serialised FetchWeightsResponse, without copying the data."""
    view, offset = memoryview(message), 0
    # What every protobuf writes: field 1, a varint, unless it is 0; field 2, its length and its bytes.
    position = 0
    if message[:1] == b"\x08":
        offset, position = _varint(message, 1)
    if message[position : position + 1] == b"\x12":
        size, position = _varint(message, position + 1)
        if position + size == len(message):
            return offset, view[position:]
    parsed = weights_pb2.FetchWeightsResponse.FromString(message)
    return parsed.offset_bytes, memoryview(parsed.data)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A varint and the position behind it."""
    value = shift = 0
    for index in range(position, min(position + 10, len(message))):
        value |= (message[index] & 0x7F) << shift
        if message[index] < 0x80:
            return value, index + 1
        shift += 7
    return 0, len(message)


async def _drain_into(
    arrival: Arrival, call: grpc.aio.UnaryStreamCall[Any, Piece], turn: Turn, silence_s: float, *, relay: bool
) -> None:
    """Reads a stream to the body's end. Raises TimeoutError, AioRpcError, ServiceError; SLOW for a slow relay."""
    loop = asyncio.get_running_loop()
    window_ends, before = loop.time() + SLOW_S, arrival.offset
    async with asyncio.timeout(silence_s) as idle:
        while arrival.offset < arrival.size:
            piece = await call.read()
            if not isinstance(piece, tuple):  # grpc.aio.EOF
                raise unavailable(f"the stream ended at byte {arrival.offset} of {arrival.size}")
            offset, data = piece
            waits = relay and not data
            if offset != arrival.offset or not (data or waits) or offset + len(data) > arrival.size:
                raise unavailable(
                    f"a piece of {len(data)} bytes at {offset}, expected one at {arrival.offset}"
                )
            if data:
                arrival.add(data)
                await arrival.copy_held()
                turn.goes_on()
            now = loop.time()
            idle.reschedule(now + silence_s)
            if now > window_ends:
                if relay and arrival.offset - before < SLOW_BYTES:
                    raise unavailable(
                        f"slow: {arrival.offset - before} bytes in {SLOW_S:.0f} s, at byte {arrival.offset}"
                    )
                window_ends, before = now + SLOW_S, arrival.offset


def unavailable(message: str) -> ServiceError:
    """The error for a source that cannot be reached."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WEIGHTS_UNAVAILABLE", message)
