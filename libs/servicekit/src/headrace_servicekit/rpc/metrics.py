"""Prometheus figures of every server, and the HTTP port that exposes them."""

from __future__ import annotations

import errno
import hmac
import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
from prometheus_client import Counter, Gauge, Histogram, make_wsgi_app

from headrace_servicekit.rpc.addresses import is_loopback
from headrace_servicekit.rpc.doors import DOORS
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
WEIGHT_VERIFIED = Counter(
    "headrace_weight_verified_bytes", "Bytes of mapped versions that were verified here"
)
WEIGHT_FALLBACKS = Counter(
    "headrace_weight_fallbacks", "Tries of a transport that failed and led to the next one", ["transport"]
)
RPCS_IN_FLIGHT = Gauge("headrace_rpcs_in_flight", "RPCs being handled", ["instance"])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def expose_metrics(host: str, port: int, token: str | None = None) -> Callable[[], None]:
    """Serves the process's figures at http://host:port/metrics, beyond the loopback to who bears `token` alone.

    Returns what stops it. Raises ServiceError ADDRESS_IN_USE naming the port.
    """
    expected = f"Bearer {token}".encode() if token and not is_loopback(host) else None
    page = make_wsgi_app()

    def answer(environ: Any, start: Any) -> Any:
        shown = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if expected is not None and not hmac.compare_digest(shown, expected):
            start("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
            return [b"send Authorization: Bearer with the fleet's token\n"]
        return page(environ, start)

    try:
        server: WSGIServer = make_server(host, port, answer, _Server6 if ":" in host else _Server, _Handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "ADDRESS_IN_USE",
            f"metrics port {port} on {host} is in use; set another --metrics-port (HEADRACE_METRICS_PORT)",
            port=str(port),
        ) from error
    DOORS.watch(server.server_port, frozenset)  # Nobody stays for longer than a scrape.
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        DOORS.leave(server.server_port)
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return stop
