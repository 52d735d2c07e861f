"""The frozen weights of a run that publishes only adapters: a separate version, which a receiver takes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.weights.pending import StoredWeights
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transfer import receive_weights
from headrace_servicekit.weights.transports import Transport

NUMBER = 1
"""Version number of every base."""
ASK_S = 10.0
_WHOLE = ("shm", "grpc")
"""Transports of a version that has none before it."""


def base_name(run: str) -> str:
    """Under which weight stores have a run's frozen weights."""
    return f"{run}/base"


@dataclass(frozen=True)
class Base:
    """Frozen weights in the receiver's store, the bytes that were moved for them now, and the ways that failed."""

    stored: StoredWeights
    bytes_moved: int
    fallbacks: list[str]


async def receive_base(
    store: WeightStore,
    run: str,
    wanted: common_pb2.AdapterBase,
    sources: Sequence[common_pb2.WeightSource],
    *,
    token: str | None,
    transports: Sequence[Transport],
) -> Base:
    """The base that adapters are of: the one that `store` holds, or it is taken from the first source that has it.

    One with another digest is dropped. Raises ServiceError BASE_NOT_HELD where no source has it, and what
    `receive_weights` raises.
    """
    name = base_name(run)
    held = store.find(name, NUMBER)
    if held is not None and held.version.digest == wanted.digest:
        return Base(held, 0, [])
    store.keep(name, set())
    failures = []
    for source in sources:
        try:
            found = await _described(name, source, token)
        except grpc.aio.AioRpcError as error:
            failures.append(f"{source.incarnation}: {message_of(error)}")
            continue
        if found.version.digest != wanted.digest:
            failures.append(f"{source.incarnation} has the base {found.version.digest}")
            continue
        ways = [way for way in transports if way.name in _WHOLE]
        received = await receive_weights(
            store, name, found.version, found.manifest, [found.source], token=token, transports=ways
        )
        return Base(store.get(name, NUMBER), received.bytes_moved, received.fallbacks)
    raise ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "BASE_NOT_HELD",
        f"the adapters are of the base {wanted.digest}, which no source has: {' | '.join(failures) or 'there is none'}",
    )


async def _described(
    name: str, source: common_pb2.WeightSource, token: str | None
) -> weights_pb2.GetManifestResponse:
    async with dial(source.address, token=token) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
        request = weights_pb2.GetManifestRequest(run=name, number=NUMBER)
        found: weights_pb2.GetManifestResponse = await stub.GetManifest(request, timeout=ASK_S)
        return found
