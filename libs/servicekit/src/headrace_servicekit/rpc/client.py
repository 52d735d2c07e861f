"""`dial()`: a channel whose unary calls end in time, whose messages are bounded, whose calls show the token.

Knows the contracts only to list which methods may be retried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import weights_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace.trainer.v1 import trainer_pb2

from headrace_servicekit.rpc.tls import INSTANCE_NAME, channel_credentials, client_changes
from headrace_servicekit.tracing import outgoing

DEFAULT_DEADLINE_S = 60.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_S = 20.0
_STATUS_WAIT_S = 1.0
"""From a write that fails to the status that says why."""
_CONTRACTS = (weights_pb2, fleet_pb2, reward_pb2, rollout_pb2, simulator_pb2, trainer_pb2)
_deadlines_enabled = True


def disable_deadlines() -> None:
    """Drops the deadlines of all calls of this process, so that a debugger may stop a servicer."""
    global _deadlines_enabled
    _deadlines_enabled = False


def deadlines_enabled() -> bool:
    """Whether calls of this process have deadlines."""
    return _deadlines_enabled


def dial(
    address: str, *, token: str | None, window_bytes: int = 0, name: str = INSTANCE_NAME
) -> grpc.aio.Channel:
    """Opens a channel to `address` (host:port), encrypted where this process has TLS's files. Connects on first use.

    Unary calls get a deadline of 60 s unless they name one. They are retried on UNAVAILABLE, and on
    RESOURCE_EXHAUSTED unless the server says that it lasts: every unary method of the contracts is idempotent by its
    natural key. Streams get no default deadline and no retry.
    `window_bytes` may be under way to this side from the first moment on; without it gRPC begins with 64 KiB.
    `name` must be among those of the server's certificate: an instance cannot pose as the coordinator.
    """
    options = [*channel_options(), *(_window(window_bytes) if window_bytes else ())]

    def connect() -> grpc.aio.Channel:
        credentials = channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    return Channel(connect, token)


def _window(size: int) -> list[tuple[str, Any]]:
    return [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", size)]


def channel_options() -> list[tuple[str, Any]]:
    """gRPC channel arguments of every Headrace client."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A piece of 1 MiB in one frame, not in sixty-four: a fifth less work for both sides.
        ("grpc.http2.max_frame_size", 1024 * 1024),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # How long a connection may take, whatever gRPC calls it: some round trips, across an ocean too.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Services of one fleet speak directly: a proxy of the environment is meant for other traffic.
        ("grpc.enable_http_proxy", 0),
        # Channels with other credentials or options must not share a connection's backoff.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", service_config()),
    ]


def service_config() -> str:
    """The service config: retries of the contracts' unary methods, on UNAVAILABLE and where a server has no place."""
    names = [
        {"service": service.full_name, "method": method.name}
        for module in _CONTRACTS
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.client_streaming and not method.server_streaming
    ]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.2s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


class _Method:
    """A multi-callable that adds the token, the trace and the default deadline to each call."""

    def __init__(
        self, newest: Callable[[], Callable[..., Any]], token: str | None, default_deadline_s: float | None
    ) -> None:
        self._newest = newest
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._default_deadline_s = default_deadline_s

    def __call__(
        self,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] | None = None,
        **options: Any,
    ) -> Any:
        limit = timeout if timeout is not None else self._default_deadline_s
        merged = (*(metadata or ()), *outgoing(), *self._metadata)
        call = self._newest()
        return call(request, timeout=limit if _deadlines_enabled else None, metadata=merged, **options)


class _CoreCall:
    """gRPC's inner call, which keeps two causes that grpc.aio loses.

    Where a write fails because the call has ended, grpcio 1.85 overwrites the server's status with INTERNAL "Internal
    error from Core" (grpc/grpc issue 36066). Where what is sent raises, it cancels the call and logs the error for
    nobody: who reads the answers would be cancelled. `failed` has that error, which they get.
    """

    def __init__(self, inner: Any, failed: list[Exception]) -> None:
        self._inner, self._failed = inner, failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_locally_cancelled(self) -> bool:
        for error in self._failed:
            raise error
        return bool(self._inner.is_locally_cancelled())

    async def send_serialized_message(self, message: bytes) -> None:
        try:
            await self._inner.send_serialized_message(message)
        except grpc.aio.InternalError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_WAIT_S):
                    await self._inner.status()
            raise

    def set_internal_error(self, text: str) -> None:
        if not self._inner.done():
            self._inner.set_internal_error(text)


async def _sent(requests: AsyncIterable[Any], failed: list[Exception]) -> AsyncIterator[Any]:
    try:
        async for request in requests:
            yield request
    except Exception as error:
        failed.append(error)
        raise


def _written(begin: Callable[..., Any]) -> Callable[..., Any]:
    def call(requests: Any, **options: Any) -> Any:
        failed: list[Exception] = []
        begun = begin(_sent(requests, failed) if hasattr(requests, "__aiter__") else requests, **options)
        begun._cython_call = _CoreCall(begun._cython_call, failed)
        return begun

    return call


class Channel(grpc.aio.Channel):
    """A grpc.aio channel whose calls carry the token and, when unary, a deadline.

    Once this process's certificate has been replaced, later calls go over a new connection, which shows the new one.
    Calls under way stay where they are.
    """

    def __init__(self, connect: Callable[[], grpc.aio.Channel], token: str | None) -> None:
        self._connect = connect
        self._inner = connect()
        self._former: list[grpc.aio.Channel] = []
        self._changed = client_changes()
        self._token = token

    def _newest(self) -> grpc.aio.Channel:
        if self._changed():
            self._former.append(self._inner)
            self._inner = self._connect()
        return self._inner

    def _method(self, shape: str, method: str, args: Any, options: Any, deadline_s: float | None) -> Any:
        made: dict[int, Any] = {}

        def newest() -> Any:
            inner = self._newest()
            if (generation := len(self._former)) not in made:
                found = getattr(inner, shape)(method, *args, **options)
                made.clear()
                made[generation] = _written(found) if shape.startswith("stream") else found
            return made[generation]

        newest()
        return _Method(newest, self._token, deadline_s)

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """A unary call; see `dial` for its deadline and retries."""
        return self._method("unary_unary", method, args, options, DEFAULT_DEADLINE_S)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """A server stream, without default deadline."""
        return self._method("unary_stream", method, args, options, None)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """A client stream, without default deadline."""
        return self._method("stream_unary", method, args, options, None)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """A bidirectional stream, without default deadline."""
        return self._method("stream_stream", method, args, options, None)

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel; calls in flight get `grace` seconds."""
        await asyncio.gather(*(each.close(grace) for each in (self._inner, *self._former)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Connectivity of the channel."""
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the connectivity is no longer `last_observed_state`."""
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when the channel is connected."""
        await self._inner.channel_ready()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
