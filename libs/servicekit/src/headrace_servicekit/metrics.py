"""Prometheus figures of every server, and the HTTP port that exposes them."""

from __future__ import annotations

import errno
from collections.abc import Callable

import grpc
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from headrace_servicekit.rpc.errors import ServiceError

RPCS = Counter("headrace_rpcs", "RPCs that ended, by status code", ["instance", "method", "code"])
RPC_SECONDS = Histogram(
    "headrace_rpc_seconds",
    "Duration of RPCs",
    ["instance", "method"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
WEIGHT_VERSIONS = Counter("headrace_weight_versions", "Versions that came, by transport", ["transport"])
WEIGHT_BYTES = Counter("headrace_weight_bytes", "Bytes moved for versions that came", ["transport"])
WEIGHT_FALLBACKS = Counter(
    "headrace_weight_fallbacks", "Tries of a transport that failed and led to the next one", ["transport"]
)
RPCS_IN_FLIGHT = Gauge("headrace_rpcs_in_flight", "RPCs being handled", ["instance"])


def expose_metrics(host: str, port: int) -> Callable[[], None]:
    """Serves the process's figures at http://host:port/metrics; returns what stops it.

    Raises ServiceError ADDRESS_IN_USE naming the port.
    """
    try:
        server, thread = start_http_server(port, addr=host)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "ADDRESS_IN_USE",
            f"metrics port {port} on {host} is in use; set another --metrics-port (HEADRACE_METRICS_PORT)",
            port=str(port),
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return stop
