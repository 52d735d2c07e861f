"""`GrpcServer`: a grpc.aio server with health, caps and a graceful end, and what happens around each of its RPCs.

That is authentication, figures, log context, errors and drain. Knows nothing of what its services do.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_servicekit.descriptors import for_callers
from headrace_servicekit.logs import get_logger, set_log_context
from headrace_servicekit.rpc.addresses import host_port, split_address
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES
from headrace_servicekit.rpc.doors import DOORS, Callers
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.metrics import RPC_SECONDS, RPCS, RPCS_IN_FLIGHT, expose_metrics
from headrace_servicekit.rpc.requests import (
    CHECK,
    MAX_NAME_CHARACTERS,
    Admission,
    Decoded,
    HealthChecks,
    admission,
    decoded,
    tolerant,
)
from headrace_servicekit.rpc.roles import caller, check
from headrace_servicekit.rpc.tls import check_listen, own_fleet, server_credentials
from headrace_servicekit.tracing import incoming, is_tracing, span

HEALTH_PREFIX = "/grpc.health.v1.Health/"
MOST_CALLS, OF_CONNECTION = 4096, 512
"""At work at the same time; others wait for a place, those of one connection at their caller."""
PENDING_CALLS = 65_536
ARRIVING, ARRIVAL_S = 8, 60.0
"""Requests of users that are read at the same time, and seconds that one may take."""
Users = Callable[[Any], Awaitable[ServiceError | None]]
"""Why the caller of a context may not call; None where it shows a good token."""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Admits, counts and ends the calls of one server. `token` None admits everybody, `fleet` None every role.

    With a fleet's name, which is that of the server's certificate, the table of `roles` says whose certificate may
    call what. With `users`, callers are people: each has a token of its own, and no message is read before it is known.
    Calls are counted once they have shown the token: what a stranger sends takes the place of nobody.
    `on_applied` gets the CommandHeader of each unary command that succeeded.
    """

    def __init__(
        self,
        token: str | None,
        instance: str,
        on_applied: Callable[[Any], None] = lambda header: None,
        most: int = MOST_CALLS,
        users: Users | None = None,
    ) -> None:
        self.callers = Callers()
        self._users, self._arriving = users, asyncio.Semaphore(ARRIVING)
        self.fleet: str | None = None
        self._checks = HealthChecks()
        self._places = asyncio.Semaphore(most)
        self._on_applied = on_applied
        self._expected = f"Bearer {token}".encode() if token else None
        self._instance = instance
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the handler with everything around it, or one that refuses."""
        method = handler_call_details.method
        if method == CHECK:
            return self._checks.answering(await continuation(handler_call_details))
        # A drain waits for no one who watches its health.
        work = not method.startswith(HEALTH_PREFIX)
        refusal = self._refusal(handler_call_details, work)
        if refusal is not None:
            RPCS.labels(self._instance, "(refused)", refusal.code.name).inc()
            return self._refuse(refusal)
        handler = await continuation(handler_call_details)
        if handler and self._users is not None and not handler.request_streaming:
            return self._wrap_for_users(handler, method, work, self._users)
        return handler and self._wrap(handler, method, work)

    def _refusal(self, details: grpc.HandlerCallDetails, work: bool) -> ServiceError | None:
        if self._expected is not None:
            given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
            shown = given[-1].encode() if given and isinstance(given[-1], str) else b""
            if not hmac.compare_digest(shown, self._expected):
                return ServiceError(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "UNAUTHENTICATED",
                    "the bearer token is missing or wrong; give this client the fleet's token file "
                    "(--token-file, HEADRACE_TOKEN_FILE)",
                )
        if self._draining and work:
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this instance is shutting down")
        return None

    def _refuse(self, error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(_: Any, context: Any) -> None:
            if error.code is grpc.StatusCode.UNAUTHENTICATED:
                self.callers.refuse(context.peer())
            await context.abort(error.code, error.message, error.trailing_metadata())

        # The streaming shape answers before the request is read, whatever shape the caller uses.
        return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type]

    async def drain(self, grace_s: float) -> int:
        """Refuses new calls and waits for those in flight; returns how many are left after `grace_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._in_flight

    def _wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: str, work: bool
    ) -> grpc.RpcMethodHandler[Any, Any]:
        read = Decoded if handler.request_streaming else decoded
        inner: Any = (
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )

        async def respond_once(request: Any, context: Any) -> Any:
            async with self._call(method, request, context, work) as call:
                response = await inner(read(request, method), context)
                call.accept()
                if (header := getattr(request, "header", None)) is not None:
                    self._on_applied(header)
                return response

        async def respond_many(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._call(method, request, context, work) as call:
                responses = inner(read(request, method), context)
                if not hasattr(responses, "__aiter__"):
                    await responses  # a handler that writes to the context itself
                    return
                async with aclosing(responses):
                    async for response in responses:
                        call.accept()
                        yield response
                    call.accept()

        make, behaviour = (
            _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)],
            respond_once,
        )
        if handler.response_streaming:
            behaviour = respond_many  # type: ignore[assignment]
        return make(behaviour, tolerant(handler.request_deserializer), handler.response_serializer)

    def _wrap_for_users(
        self, handler: grpc.RpcMethodHandler[Any, Any], method: str, work: bool, users: Users
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Reads the one request itself, as a stream: gRPC would read it before anybody is asked for a token."""

        async def respond(requests: Any, context: Any) -> Any:
            if (refusal := await users(context)) is not None:
                RPCS.labels(self._instance, "(refused)", refusal.code.name).inc()
                self.callers.refuse(context.peer())
                await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
            async with self._call(method, None, context, work):
                try:
                    async with self._arriving, asyncio.timeout(ARRIVAL_S):
                        request = await anext(aiter(requests))
                except (TimeoutError, StopAsyncIteration) as error:
                    message = f"no request within {ARRIVAL_S:.0f} s; send it at once"
                    raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "TOO_SLOW", message) from error
                assert handler.unary_unary is not None
                return await handler.unary_unary(decoded(request, method), context)  # type: ignore[misc]

        decode = tolerant(handler.request_deserializer)
        return grpc.stream_unary_rpc_method_handler(respond, decode, handler.response_serializer)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _call(self, method: str, request: Any, context: Any, work: bool) -> AsyncIterator[Admission]:
        started, code = time.perf_counter(), "OK"
        self.callers.admit(context.peer())
        self._enter(work)
        run = getattr(getattr(request, "header", None), "run", "")
        set_log_context(instance=self._instance, run=run[:MAX_NAME_CHARACTERS])
        try:
            if self.fleet is not None:
                check(method, caller(context), self.fleet)
            with self._traced(method, context, run), admission() as call:
                async with self._places:  # Waits as long as the caller does.
                    yield call
        except ServiceError as error:
            code = error.code.name
            if error.code is grpc.StatusCode.INVALID_ARGUMENT:
                _logger.warning("refused a request", extra={"method": method, "why": error.message})
            await context.abort(error.code, error.message, error.trailing_metadata())
        except grpc.aio.AbortError:
            code = _code_name(context)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except (
            Exception
        ) as error:  # a bug: the caller gets an error that names the method, the log has the traceback
            code = "INTERNAL"
            _logger.exception("unexpected failure", extra={"method": method})
            unexpected = _unexpected(error, method, self._instance)
            await context.abort(unexpected.code, unexpected.message, unexpected.trailing_metadata())
        finally:
            self._leave(work)
            RPCS.labels(self._instance, method, code).inc()
            RPC_SECONDS.labels(self._instance, method).observe(time.perf_counter() - started)

    def _traced(self, method: str, context: Any, run: str) -> AbstractContextManager[Any]:
        """A span, where the caller has a trace."""
        caller = incoming(context.invocation_metadata()) if is_tracing() else ""
        return span(method.lstrip("/"), caller, instance=self._instance, run=run) if caller else nullcontext()

    def _enter(self, work: bool) -> None:
        self._in_flight += work
        if self._in_flight:
            self._idle.clear()
        RPCS_IN_FLIGHT.labels(self._instance).set(self._in_flight)

    def _leave(self, work: bool) -> None:
        self._in_flight -= work
        RPCS_IN_FLIGHT.labels(self._instance).set(self._in_flight)
        if self._in_flight == 0:
            self._idle.set()


_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _unexpected(error: Exception, method: str, instance: str) -> ServiceError:
    where = f"the log of {instance}" if instance else "the server's log"
    message = f"{method} failed unexpectedly ({type(error).__name__}: {error}); the traceback is in {where}"
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", message)


def _code_name(context: Any) -> str:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "UNKNOWN")


AddServicer = Callable[[Any, grpc.aio.Server], None]
_logger = get_logger(__name__)
STOP_S = 5.0


class GrpcServer:
    """One listening gRPC server.

    `listen` is host:port, port 0 picks a free one; `token` is the bearer token every caller must show (but for
    a Check of its health); beyond loopback there must be one. `users` asks each caller for a token of its own in
    place of that one, and for no certificate.
    """

    def __init__(
        self,
        listen: str,
        *,
        token: str | None,
        instance: str = "",
        reflection: bool = False,
        metrics_port: int | None = None,
        max_concurrent_rpcs: int = MOST_CALLS,
        on_applied: Callable[[Any], None] = lambda header: None,
        users: Users | None = None,
    ) -> None:
        self._listen, self._users = listen, users
        self._token = token
        self._reflection = reflection
        self._metrics_port = metrics_port
        self._stop_metrics: Callable[[], None] | None = None
        self._guard = CallGuard(None if users else token, instance, on_applied, max_concurrent_rpcs, users)
        self._port = 0
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names: list[str] = []
        # No `maximum_concurrent_rpcs`: gRPC would count calls that are refused for want of the token.
        self._server = grpc.aio.server(interceptors=[self._guard], options=_server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.draining = asyncio.Event()

    def add_service(self, add_to_server: AddServicer, servicer: Any, full_name: str) -> None:
        """Mounts a servicer; `full_name` is the service's name in health checks and reflection."""
        add_to_server(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> str:
        """Listens and reports healthy; returns the bound host:port.

        Raises ServiceError TOKEN_REQUIRED or CERTIFICATE_REQUIRED beyond loopback without one, and ADDRESS_IN_USE.
        """
        host = check_listen(self._listen, self._token)
        if self._reflection:
            reflection.enable_server_reflection([*self._names, reflection.SERVICE_NAME], self._server)
        port = self._port = self._bind()
        DOORS.watch(port, self._guard.callers.known, self._guard.callers)
        if self._metrics_port is not None:
            self._stop_metrics = expose_metrics(host, self._metrics_port, self._token)
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return host_port(host, port)

    def _bind(self) -> int:
        credentials = server_credentials(of_clients=self._users is None)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                self._guard.fleet = own_fleet() if self._users is None else None
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
        DOORS.leave(self._port)
        if self._stop_metrics is not None:
            self._stop_metrics()
            self._stop_metrics = None


def _server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", for_callers()),
        ("grpc.max_concurrent_streams", OF_CONNECTION),
        # Calls that have come wait for their turn: none is turned away.
        ("grpc.server.max_pending_requests", PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
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
