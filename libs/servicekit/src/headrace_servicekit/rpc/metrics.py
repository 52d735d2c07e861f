"""Prometheus figures of every process: calls, weights, build, disks, certificates; the port that exposes them."""

from __future__ import annotations

import errno
import hmac
import platform
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_servicekit.rpc.addresses import is_loopback
from headrace_servicekit.rpc.doors import DOORS
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, server_context, tls_dir

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
CHECKPOINTS, WEIGHTS = "checkpoints", "weights"


class Machine(Collector):
    """Figures of this process's surroundings."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        """What is watched, by what is written there."""

    def describe(self) -> list[Metric]:
        """Nothing: registering reads no disk and no certificate."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families. A folder or a certificate that cannot be read has no figure."""
        build = GaugeMetricFamily("headrace_build_info", "1, of the build", labels=["version", "python"])
        build.add_metric([version("headrace-servicekit"), platform.python_version()], 1)
        yield build
        free = GaugeMetricFamily("headrace_disk_free_bytes", "Free, of a folder's disk", labels=["folder"])
        size = GaugeMetricFamily("headrace_disk_size_bytes", "Size of a folder's disk", labels=["folder"])
        for folder, path in sorted(self.folders.items()):
            try:
                usage = shutil.disk_usage(path)
            except OSError:
                continue
            free.add_metric([folder], usage.free)
            size.add_metric([folder], usage.total)
        yield from (free, size)
        ends = GaugeMetricFamily(
            "headrace_certificate_end_seconds",
            "When a certificate ends, since the epoch",
            labels=["certificate"],
        )
        for name, end in sorted(_ends(tls_dir()).items()):
            ends.add_metric([name], end)
        yield ends


def _ends(folder: Path | None) -> dict[str, float]:
    """When this process's certificates end: "authority" and "host"."""
    if folder is None:
        return {}
    from cryptography import x509  # only encrypted fleets need it

    found = {}
    for name, file in (("authority", AUTHORITY), ("host", CERTIFICATE)):
        try:
            certificate = x509.load_pem_x509_certificate((folder / file).read_bytes())
        except (OSError, ValueError):
            continue
        found[name] = certificate.not_valid_after_utc.timestamp()
    return found


MACHINE = Machine()
REGISTRY.register(MACHINE)


def watch(folders: Mapping[str, Path | None]) -> None:
    """Shows the disks of these folders from now on; None: this process has no such folder."""
    MACHINE.folders |= {name: path for name, path in folders.items() if path is not None}


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    encryption: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection; its thread shakes hands, as it reads, so that nobody keeps others waiting."""
        connection, address = super().get_request()
        if self.encryption:
            connection = self.encryption.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or speaks no TLS, is no news either."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


def expose_metrics(host: str, port: int, token: str | None = None) -> Callable[[], None]:
    """Serves the process's figures at http://host:port/metrics.

    Beyond the loopback to who bears `token` alone, and by https with the newest of this process's certificates.

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
        server = make_server(host, port, answer, _Server6 if ":" in host else _Server, _Handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "ADDRESS_IN_USE",
            f"metrics port {port} on {host} is in use; set another --metrics-port (HEADRACE_METRICS_PORT)",
            port=str(port),
        ) from error
    if not is_loopback(host) and (folder := tls_dir()):
        server.encryption = server_context(folder)
    DOORS.watch(server.server_port, frozenset)  # Nobody stays for longer than a scrape.
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        DOORS.leave(server.server_port)
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return stop
