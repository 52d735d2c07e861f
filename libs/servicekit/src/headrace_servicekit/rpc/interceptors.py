"""What happens around every RPC of a server: authentication, figures, log context, errors, drain."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio

from headrace_servicekit.lease.fence import Admission, admission
from headrace_servicekit.logs import get_logger, set_log_context
from headrace_servicekit.metrics import RPC_SECONDS, RPCS, RPCS_IN_FLIGHT
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import MAX_NAME_CHARACTERS, Decoded, decoded, tolerant
from headrace_servicekit.tracing import incoming, is_tracing, span

HEALTH_PREFIX = "/grpc.health.v1.Health/"
_logger = get_logger(__name__)


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Admits, counts and ends the calls of one server. `token` None admits everybody.

    `on_applied` gets the CommandHeader of each unary command that succeeded.
    """

    def __init__(
        self, token: str | None, instance: str, on_applied: Callable[[Any], None] = lambda header: None
    ) -> None:
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
        # A health check has no token, and a drain does not wait for it.
        work = not method.startswith(HEALTH_PREFIX)
        refusal = self._refusal(handler_call_details) if work else None
        if refusal is not None:
            RPCS.labels(self._instance, "(refused)", refusal.code.name).inc()
            return _refuse(refusal)
        handler = await continuation(handler_call_details)
        return handler and self._wrap(handler, method, work)

    def _refusal(self, details: grpc.HandlerCallDetails) -> ServiceError | None:
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
        if self._draining:
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "this instance is shutting down")
        return None

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

    @asynccontextmanager
    async def _call(self, method: str, request: Any, context: Any, work: bool) -> AsyncIterator[Admission]:
        started, code = time.perf_counter(), "OK"
        self._enter(work)
        run = getattr(getattr(request, "header", None), "run", "")
        set_log_context(instance=self._instance, run=run[:MAX_NAME_CHARACTERS])
        try:
            with self._traced(method, context, run), admission() as call:
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


def _refuse(error: ServiceError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: Any) -> None:
        await context.abort(error.code, error.message, error.trailing_metadata())

    # The streaming shape answers before the request is read, whatever shape the caller uses.
    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type]


def _unexpected(error: Exception, method: str, instance: str) -> ServiceError:
    where = f"the log of {instance}" if instance else "the server's log"
    message = f"{method} failed unexpectedly ({type(error).__name__}: {error}); the traceback is in {where}"
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", message)


def _code_name(context: Any) -> str:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "UNKNOWN")
