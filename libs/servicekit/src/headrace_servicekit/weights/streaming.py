"""A version over gRPC, its bytes or its changes, in order: from one source after the other, each from where the last
one ended. Knows of relays only that they say when their host has the version elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2
from typing_extensions import override

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of, metadata_of, reason_of
from headrace_servicekit.weights.arrivals import Arrival
from headrace_servicekit.weights.versions import unavailable
from headrace_servicekit.weights.ways import Attempt, Found, Links, Way

WINDOW_BYTES = 8 * 1024 * 1024
IDLE_TIMEOUT_S = 30.0
RELAY_SILENCE_S = 5.0
"""A relay gives a sign of life each second; one that is silent for so long is dead."""
SLOW_S, SLOW_BYTES = 10.0, 10 * 1024 * 1024
"""A relay that moves fewer bytes in that time is slow, and the next source is asked for the rest."""
_FETCH = "/headrace.common.v1.WeightService/FetchWeights"


class Stream(Way):
    """Streamed over gRPC in pieces, which works everywhere; `changes`: made of a version that is held."""

    def __init__(self, links: Links, *, changes: bool = False) -> None:
        self.links, self._of_changes = links, changes
        self.name = "delta" if changes else "grpc"
        self.kind = common_pb2.WEIGHT_TRANSPORT_DELTA if changes else common_pb2.WEIGHT_TRANSPORT_GRPC

    @override
    def offered(self, attempt: Attempt, source: common_pb2.WeightSource) -> bool:
        """Changes: where they are the quicker way. Raises ServiceError BASE_NOT_HELD for a receiver of another base."""
        if not self._of_changes:
            return super().offered(attempt, source)
        if not source.delta_bases or not source.address or not attempt.held:
            return False  # a first version, or a source without any other
        if self.links is None or not self.links.wants_changes():
            return False
        if attempt.base(source) is None:
            held = ", ".join(f"{each.version.number} ({each.version.digest})" for each in attempt.held)
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "BASE_NOT_HELD",
                f"the changes are against {', '.join(source.delta_bases)}, and here is {held}",
            )
        return True

    @override
    async def take(self, attempt: Attempt, sources: Sequence[common_pb2.WeightSource]) -> Found | None:
        async def pour(arrival: Arrival) -> bool:
            for source in sources:
                base = attempt.base(source) if self._of_changes else None
                if base is not None:
                    arrival.restart(base)
                with attempt.noting(self.name, source):
                    await _download(arrival, source, attempt)
                    return True
                if attempt.failures[-1].reason == "DIGEST_MISMATCH":
                    arrival.rewind()
            return False

        held = {} if self._of_changes else await asyncio.to_thread(attempt.kept)
        return await attempt.fill(pour, held)


async def _download(arrival: Arrival, source: common_pb2.WeightSource, attempt: Attempt) -> None:
    """Fills the body from where it is, going on at the offset reached when a stream breaks after it made progress.

    A relay is followed where it says that another instance of its host has the version.
    """
    address, led_on = source.address, False
    request = weights_pb2.FetchWeightsRequest(
        run=attempt.run, number=attempt.version.number, relay=source.relay, held=arrival.held
    )
    if arrival.base is not None:
        request.base_digest = arrival.base.version.digest
    while arrival.offset < arrival.size:
        request.offset_bytes = arrival.offset
        try:
            await _stream(arrival, address, request, attempt)
        except grpc.aio.AioRpcError as error:
            if source.relay and not led_on and reason_of(error) == "ELSEWHERE":
                address, led_on = metadata_of(error)["address"], True
            elif arrival.offset == request.offset_bytes:
                raise unavailable(f"{address}: {message_of(error)}") from error


async def _stream(
    arrival: Arrival, address: str, request: weights_pb2.FetchWeightsRequest, attempt: Attempt
) -> None:
    silence_s = RELAY_SILENCE_S if request.relay else IDLE_TIMEOUT_S
    async with dial(address, token=attempt.token, window_bytes=WINDOW_BYTES) as channel:
        fetch = channel.unary_stream(
            _FETCH,
            request_serializer=weights_pb2.FetchWeightsRequest.SerializeToString,
            response_deserializer=weights_pb2.FetchWeightsResponse.FromString
            if request.base_digest
            else split_piece,
        )
        call = fetch(request)
        try:
            await _drain_into(arrival, call, attempt, silence_s, relay=request.relay)
        except TimeoutError as error:
            raise unavailable(
                f"{address} sent nothing for {silence_s:.0f} s at byte {arrival.offset}"
            ) from error
        finally:
            call.cancel()


async def _drain_into(
    arrival: Arrival,
    call: grpc.aio.UnaryStreamCall[Any, Any],
    attempt: Attempt,
    silence_s: float,
    *,
    relay: bool,
) -> None:
    """Reads a stream to the body's end. Raises TimeoutError, AioRpcError, ServiceError; SLOW for a slow relay."""
    loop = asyncio.get_running_loop()
    window_ends, before = loop.time() + SLOW_S, arrival.offset
    async with asyncio.timeout(silence_s) as idle:
        while arrival.offset < arrival.size:
            piece = await call.read()
            if not isinstance(piece, tuple | weights_pb2.FetchWeightsResponse):  # grpc.aio.EOF
                raise unavailable(f"the stream ended at byte {arrival.offset} of {arrival.size}")
            reached = arrival.offset
            await (_add(arrival, piece, relay=relay) if isinstance(piece, tuple) else arrival.change(piece))
            if arrival.offset > reached:
                attempt.turn.goes_on()
            elif not relay:
                raise unavailable(f"a piece of nothing at byte {reached}")
            now = loop.time()
            idle.reschedule(now + silence_s)
            if now > window_ends:
                if relay and arrival.offset - before < SLOW_BYTES:
                    raise unavailable(
                        f"slow: {arrival.offset - before} bytes in {SLOW_S:.0f} s, at byte {arrival.offset}"
                    )
                window_ends, before = now + SLOW_S, arrival.offset


Piece = tuple[int, memoryview]


async def _add(arrival: Arrival, piece: Piece, *, relay: bool) -> None:
    """Adds bytes at their place; a relay's sign that it waits is empty."""
    offset, data = piece
    if offset != arrival.offset or not (data or relay) or offset + len(data) > arrival.size:
        raise unavailable(f"a piece of {len(data)} bytes at {offset}, expected one at {arrival.offset}")
    if data:
        await arrival.add(data)


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
