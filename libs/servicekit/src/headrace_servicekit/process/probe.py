"""Asks a server's gRPC health service and says so by exit status: the health check of a container.

python -m headrace_servicekit.process.probe [HOST:PORT]

Without an address it asks every server that HEADRACE_LISTEN and HEADRACE_COUNT name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_servicekit.lease.devices import instance_count
from headrace_servicekit.rpc.addresses import host_port, split_address
from headrace_servicekit.rpc.tls import channel_credentials, tls_dir

TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """0 when each server is SERVING, else 1."""
    arguments = sys.argv[1:] if argv is None else argv
    addresses = arguments[:1] or _own_addresses(os.environ.get("HEADRACE_LISTEN", ""))
    return int(not all(_serves(address) for address in addresses))


def _serves(address: str) -> bool:
    try:
        status = _ask(address)
    except grpc.RpcError as error:
        print(f"{address}: {error.code().name} {error.details()}")
        return False
    print(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def _ask(address: str) -> int:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    folder, credentials = tls_dir(), channel_credentials()
    if folder is None or credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        from headrace_servicekit.rpc.certificates import service_name  # takes `cryptography` along

        options.append(("grpc.ssl_target_name_override", service_name(folder)))
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return int(answer.status)


def _own_addresses(listen: str) -> list[str]:
    """Where this host reaches its own servers: the same ports, at the loopback for those that listen everywhere."""
    host, port = split_address(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return [
        host_port(host, int(port) + index)
        for index in range(instance_count(os.environ.get("HEADRACE_COUNT", "1")))
    ]


if __name__ == "__main__":
    raise SystemExit(main())
