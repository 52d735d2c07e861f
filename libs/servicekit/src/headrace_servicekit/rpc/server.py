"""`GrpcServer`: a grpc.aio server with health, authentication, caps, figures and a graceful end.

Knows nothing of what its services do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_servicekit.logs import get_logger
from headrace_servicekit.metrics import expose_metrics
from headrace_servicekit.rpc.addresses import host_port, is_loopback, split_address
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.interceptors import CallGuard
from headrace_servicekit.rpc.tls import server_credentials

AddServicer = Callable[[Any, grpc.aio.Server], None]
_logger = get_logger(__name__)
STOP_S = 5.0


class GrpcServer:
    """One listening gRPC server.

    `listen` is host:port, port 0 picks a free one; `token` is the bearer token every caller must show (the
    health service is exempt); beyond loopback there must be one.
    """

    def __init__(
        self,
        listen: str,
        *,
        token: str | None,
        instance: str = "",
        reflection: bool = False,
        metrics_port: int | None = None,
        max_concurrent_rpcs: int = 512,
        on_applied: Callable[[Any], None] = lambda header: None,
    ) -> None:
        self._listen = listen
        self._token = token
        self._reflection = reflection
        self._metrics_port = metrics_port
        self._stop_metrics: Callable[[], None] | None = None
        self._guard = CallGuard(token, instance, on_applied)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names: list[str] = []
        self._server = grpc.aio.server(
            interceptors=[self._guard], options=_server_options(), maximum_concurrent_rpcs=max_concurrent_rpcs
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.draining = asyncio.Event()

    def add_service(self, add_to_server: AddServicer, servicer: Any, full_name: str) -> None:
        """Mounts a servicer; `full_name` is the service's name in health checks and reflection."""
        add_to_server(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> str:
        """Listens and reports healthy; returns the bound host:port.

        Raises ServiceError TOKEN_REQUIRED beyond loopback without a token, and ADDRESS_IN_USE.
        """
        host, _ = split_address(self._listen)
        if not self._token and not is_loopback(host):
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "TOKEN_REQUIRED",
                f"refusing to listen on {self._listen} without a token: set --token-file "
                "(HEADRACE_TOKEN_FILE) to a file with a secret that the fleet shares, or listen on 127.0.0.1",
            )
        if self._reflection:
            reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self._server)
        port = self._bind()
        if self._metrics_port is not None:
            self._stop_metrics = expose_metrics(host, self._metrics_port)
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return host_port(host, port)

    def _bind(self) -> int:
        credentials = server_credentials()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                port = self._server.add_secure_port(self._listen, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "ADDRESS_IN_USE",
                f"cannot listen on {self._listen}: the port is in use or the address is not of this host; "
                "stop the other process or set another --listen (HEADRACE_LISTEN)",
                port=split_address(self._listen)[1],
            )
        return port

    async def drain(self, grace_s: float = 10.0) -> None:
        """Reports NOT_SERVING, refuses new calls, gives calls in flight `grace_s` seconds, then stops."""
        self.draining.set()
        await self._health.enter_graceful_shutdown()
        left = await self._guard.drain(grace_s)
        if left:
            _logger.warning("stopping with calls in flight", extra={"calls": left})
        try:
            async with asyncio.timeout(STOP_S):
                await self._server.stop(0)
        except TimeoutError:
            # Seen once in thousands of stops: gRPC's poller never reports the end. The process goes on to its own.
            _logger.warning("the gRPC server did not confirm its stop", extra={"waited_s": STOP_S})
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None


def _server_options() -> list[tuple[str, int]]:
    return [
        # Two servers on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A piece of 1 MiB in one frame, not in sixty-four: a fifth less work for both sides.
        ("grpc.http2.max_frame_size", 1024 * 1024),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
