"""An OTLP collector: takes spans over gRPC, as a real one does, and keeps them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from harness.processes import free_port


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on the loopback inside the block."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """(service.name, span), in the order of arrival."""
        self.endpoint = f"http://127.0.0.1:{free_port()}"

    def Export(self, request: Any, context: Any) -> Any:
        """Keeps the spans of a request."""
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(4))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self._server.add_insecure_port(self.endpoint.removeprefix("http://"))
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0)


def attributes(span: Any) -> dict[str, str | int]:
    """Attributes of a span, of texts and whole numbers."""
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
