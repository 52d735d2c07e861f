"""An S3 server of its own process (moto's), and a proxy before it that breaks what a test names."""

from __future__ import annotations

import http.client
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from harness.processes import free_port
from harness.waiting import wait_for

Fault = Callable[[str, str], str]
"""Of a method and a path with its query: what goes wrong, "" for nothing, else one of `FAULTS`, or delay:SECONDS."""
CODES = {
    "SlowDown": 503,
    "InternalError": 500,
    "ExpiredToken": 403,
    "AccessDenied": 403,
    "RequestTimeTooSkewed": 403,
}
FAULTS = ("reset", "cut", "flip", *CODES)
"""reset: the connection is reset in the middle of the body; cut: half of the answer comes; flip: one bit of it is
another; others: S3's own codes.
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server with nothing in it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/moto-api/", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(answers, "the S3 server to answer", 60)
        yield address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def environment_of(address: str) -> dict[str, str]:
    """Variables by which S3's packages find a server, with credentials."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def make_bucket(address: str, name: str) -> None:
    """Creates a bucket."""
    request = urllib.request.Request(f"{address}/{name}", method="PUT")
    request.add_header(
        "Authorization", "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request, Signature=x"
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


class FaultProxy:
    """A proxy on loopback; `fault` is asked for each request, and `seen` has their methods and paths."""

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda _method, _path: ""
        self.seen: list[tuple[str, str]] = []
        self.broken: list[str] = []
        """Faults that were met."""
        self.largest = 0
        """Bytes of the largest body."""
        self._host = upstream.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self) -> None:
                with suppress(ConnectionError):  # the client was killed
                    proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, asked: BaseHTTPRequestHandler) -> None:
        """One request: broken, or passed on."""
        method, path = asked.command, asked.path
        self.seen.append((method, path))
        fault = self.fault(method, path)
        length = int(asked.headers.get("Content-Length") or 0)
        if asked.headers.get("Expect", "").lower() == "100-continue":
            asked.send_response_only(100)
            asked.end_headers()
        if fault:
            self.broken.append(fault)
        if fault == "reset":
            asked.rfile.read(length // 2)
            self._reset(asked.connection)
            asked.close_connection = True
            return
        body = asked.rfile.read(length) if length else b""
        self.largest = max(self.largest, length)
        if fault.startswith("delay:"):
            time.sleep(float(fault.partition(":")[2]))
        if fault in CODES:
            self._refuse(asked, fault)
            return
        headers = {name: value for name, value in asked.headers.items() if name.lower() != "expect"}
        upstream = http.client.HTTPConnection(self._host, timeout=60)
        try:
            upstream.request(method, path, body=body, headers=headers)
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        if fault == "flip" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        asked.send_response_only(answer.status, answer.reason)
        sized = False
        for name, value in answer.getheaders():
            if name.lower() in ("transfer-encoding", "connection") or name.lower().startswith(
                "x-amz-checksum"
            ):
                continue
            sized = sized or name.lower() == "content-length"
            asked.send_header(name, value)
        if not sized:
            asked.send_header("Content-Length", str(len(content)))
        asked.end_headers()
        if method != "HEAD":
            asked.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
        if fault == "cut":
            asked.wfile.flush()
            self._reset(asked.connection)
            asked.close_connection = True

    @staticmethod
    def _refuse(asked: BaseHTTPRequestHandler, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
        asked.send_response_only(CODES[code])
        asked.send_header("Content-Type", "application/xml")
        asked.send_header("Content-Length", str(len(text)))
        asked.end_headers()
        if asked.command != "HEAD":
            asked.wfile.write(text)

    @staticmethod
    def _reset(connection: socket.socket) -> None:
        """Closes with RST in place of FIN."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def once(fault: str, method: str, part: str, nth: int = 1) -> Fault:
    """The nth request of a method whose path has a part in it meets a fault, and no other."""
    met = 0

    def look(given: str, path: str) -> str:
        nonlocal met
        if given != method or part not in path:
            return ""
        met += 1
        return fault if met == nth else ""

    return look


def always(fault: str, method: str = "", part: str = "") -> Fault:
    """All requests of a method whose path has a part in it meet a fault."""
    return lambda given, path: fault if method in ("", given) and part in path else ""
