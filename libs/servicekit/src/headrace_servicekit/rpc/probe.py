"""Asks a server's gRPC health service and says so by exit status: the health check of a container.

python -m headrace_servicekit.rpc.probe [HOST:PORT]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the server at the address, by default where HEADRACE_LISTEN says, is SERVING, else 1."""
    arguments = sys.argv[1:] if argv is None else argv
    address = arguments[0] if arguments else _own_address(os.environ.get("HEADRACE_LISTEN", ""))
    try:
        status = _ask(address)
    except grpc.RpcError as error:
        print(f"{address}: {error.code().name} {error.details()}")
        return 1
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
    return int(status != health_pb2.HealthCheckResponse.SERVING)


def _ask(address: str) -> int:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return int(answer.status)


def _own_address(listen: str) -> str:
    """Where this host reaches its own server: the same port, at the loopback for one that listens everywhere."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "::", "[::]") else listen


if __name__ == "__main__":
    raise SystemExit(main())
