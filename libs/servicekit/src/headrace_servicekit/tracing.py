"""OpenTelemetry traces to a collector. Off, and nothing of OpenTelemetry is imported, until `start_tracing`.

A trace begins with `trace` (a step of a run) or `span` (a request of the HTTP API). Calls that are made inside carry
its `traceparent` (W3C), and a server whose caller sent one makes a span. Heartbeats and the like make none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

EXPORT_S = 5.0
"""Deadline of one delivery to the collector."""
CLOSE_S = 2.0
"""How long the end of a process waits for the last spans."""
QUEUED = 8192
"""Spans kept for the collector; more are lost, and training goes on."""
QUIET_S = 60.0
"""Seconds between two lines of the log that say that the collector is away."""
TRACEPARENT = "traceparent"
_log = logging.getLogger(__name__)


class Scope:
    """Where spans of a task go: below `span`. A run has one scope for all of its steps, which follow each other."""

    def __init__(self, span: Span | None = None) -> None:
        self.span = span


_provider: TracerProvider | None = None
_tracer: Tracer | None = None
_logs: LoggerProvider | None = None
_endpoint = ""
_scope: ContextVar[Scope | None] = ContextVar("headrace_trace", default=None)


def check_endpoint(endpoint: str) -> str:
    """The endpoint itself. Raises ValueError unless it is empty or http(s)://HOST:PORT."""
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme not in ("http", "https") or not parts.port or parts.path.strip("/")):
        raise ValueError(f"{endpoint[:200]!r} is no OTLP endpoint; write http://HOST:4317")
    return endpoint


class TracingMissing(Exception):
    """Traces are wanted, and the extra `tracing` is not installed; one sentence says what to do."""


def start_tracing(endpoint: str, kind: str, instance: str) -> None:
    """Sends spans to the OTLP collector at http://HOST:PORT from now on, over gRPC; "" sends none.

    Raises TracingMissing where the extra `tracing` is not installed.
    """
    global _provider, _tracer, _endpoint
    if not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingMissing(
            f"traces to {endpoint} need OpenTelemetry ({error}): pip install 'headrace-servicekit[tracing]', or unset "
            "HEADRACE_OTLP_ENDPOINT"
        ) from error
    _say_seldom()
    _endpoint = endpoint
    resource = Resource.create({"service.name": f"headrace-{kind}", "service.instance.id": instance})
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_S)
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=QUEUED, schedule_delay_millis=1000, export_timeout_millis=EXPORT_S * 1000
        )
    )
    _tracer = _provider.get_tracer("headrace")


def stop_tracing() -> None:
    """Sends what is left, for at most CLOSE_S."""
    global _provider, _tracer, _logs
    for provider in (_provider, _logs):
        if provider is not None:
            provider.force_flush(int(CLOSE_S * 1000))
    _provider = _tracer = _logs = None


def log_handler() -> logging.Handler | None:
    """A handler that sends records to the collector of traces as log records; None while none is known.

    The text of a record is the body; what it was given as `extra={"attributes": …}` are its attributes.
    """
    global _logs
    if _provider is None:
        return None
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    if _logs is None:
        _logs = LoggerProvider(resource=_provider.resource, shutdown_on_exit=False)
        exporter = OTLPLogExporter(_endpoint, insecure=_endpoint.startswith("http://"), timeout=EXPORT_S)
        _logs.add_log_record_processor(
            BatchLogRecordProcessor(exporter, max_queue_size=QUEUED, schedule_delay_millis=1000)
        )
    logger = _logs.get_logger("headrace")

    class Sent(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            made = LogRecord(
                timestamp=int(record.created * 1e9),
                observed_timestamp=time.time_ns(),
                severity_number=SeverityNumber.INFO,
                severity_text=record.levelname,
                body=record.getMessage(),
                attributes=getattr(record, "attributes", {}),
                event_name=record.name,
            )
            logger.emit(made)

    return Sent()


def is_tracing() -> bool:
    """Whether spans are sent."""
    return _tracer is not None


def open_scope() -> None:
    """Gives this task, and those that it starts, a scope of their own, in which `trace` begins traces."""
    if _tracer is not None:
        _scope.set(Scope())


@contextmanager
def trace(name: str, **attributes: Any) -> Iterator[None]:
    """A trace of its own around the body, in the task's scope: also for what tasks of the scope do meanwhile."""
    scope = _scope.get()
    if _tracer is None or scope is None:
        yield
        return
    from opentelemetry.context import Context

    scope.span = _tracer.start_span(name, Context(), attributes=_named(attributes))
    try:
        yield
    except BaseException as error:
        _fail(scope.span, error)
        raise
    finally:
        scope.span.end()
        scope.span = None


@contextmanager
def span(name: str, parent: str = "", **attributes: Any) -> Iterator[Span | None]:
    """A server's span around the body, below the caller's `parent` (a traceparent) or, without one, of a new trace."""
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    made = _tracer.start_span(name, _remote(parent), SpanKind.SERVER, _named(attributes))
    before = _scope.get()
    _scope.set(Scope(made))
    try:
        yield made
    except BaseException as error:
        _fail(made, error)
        raise
    finally:
        made.end()
        _scope.set(before)


def record(
    name: str, start: float, end: float, events: Iterable[tuple[str, float]] = (), **attributes: Any
) -> None:
    """A span that is over, below the scope's; times in seconds since the epoch. Nothing outside a trace."""
    scope = _scope.get()
    if _tracer is None or scope is None or scope.span is None:
        return
    from opentelemetry.trace import set_span_in_context

    made = _tracer.start_span(
        name, set_span_in_context(scope.span), attributes=_named(attributes), start_time=int(start * 1e9)
    )
    for what, at in events:
        made.add_event(what, timestamp=int(at * 1e9))
    made.end(int(end * 1e9))


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is made now: the traceparent, where there is a trace."""
    scope = _scope.get()
    if scope is None or scope.span is None:
        return ()
    context = scope.span.get_span_context()
    return ((TRACEPARENT, f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),)


def incoming(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The caller's traceparent, or "" where it sent none or no spans are sent."""
    if _tracer is None:
        return ""
    return next((value for key, value in metadata or () if key == TRACEPARENT), "")


def _remote(parent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent}, Context()) if parent else Context()


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"headrace.{name}": value for name, value in attributes.items()}


def _fail(failed: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    failed.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500]))


class _Seldom(logging.Handler):
    """Passes on one record of OpenTelemetry's a minute: it repeats itself while the collector is away."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET_S
            _log.warning(
                "traces are not delivered, and work goes on", extra={"why": record.getMessage()[:300]}
            )


def _say_seldom() -> None:
    theirs = logging.getLogger("opentelemetry")
    theirs.propagate = False
    theirs.handlers = [_Seldom()]
