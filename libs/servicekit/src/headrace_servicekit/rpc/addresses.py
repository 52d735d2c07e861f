"""HOST:PORT, read and written in one place; free ports, and interfaces of this host.

A host of IPv6 has brackets in HOST:PORT, and none when it stands alone.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from pathlib import Path

MAX_PORT = 65535


def split_address(address: str, default_port: int | None = None) -> tuple[str, str]:
    """Host, without brackets, and port of host:port or [v6]:port; `default_port` where none is named.

    Raises ServiceError INVALID when it is neither.
    """
    if (found := parse_address(address, default_port)) is not None:
        return found
    import grpc

    from headrace_servicekit.rpc.errors import ServiceError

    raise ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID",
        f"{address[:300]!r} is no address; write host:port, or [host]:port for an address of IPv6",
    )


def parse_address(address: str, default_port: int | None = None) -> tuple[str, str] | None:
    """Like `split_address`, but returns None for a text that is no address. Imports no gRPC."""
    host, colon, port = address.rpartition(":")
    if default_port is not None and (not colon or address.endswith("]") or _is_v6(address)):
        host, port = address, str(default_port)
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1] if _is_v6(host[1:-1]) else ""
    elif ":" in host and not (default_port is not None and host is address):
        host = ""  # Nobody knows where it ends.
    return (host, port) if host and is_port else None


def host_port(host: str, port: int | str) -> str:
    """host:port, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised_host(listen: str, advertise: str) -> str:
    """The host that others reach a server at: the advertised one, the one it listens on, or this host's name."""
    host, _ = split_address(listen)
    if advertise:
        return advertise.strip("[]")
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at one address of this host, or at all for 0.0.0.0 and ::. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
"""Ports of `free_port`."""
KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that the kernel chooses where a process asks for any: a listener on port 0, an outgoing connection."""
TRIES = 50


def free_port(first: int = FIRST, last: int = LAST, kernels: Path = KERNELS_RANGE) -> int:
    """A free port; if possible, one that the kernel does not choose by itself.

    Whoever binds it does so seconds later, and again after each restart: one of the kernel's may be taken by then.
    The others are from `first` to `last` and below those that the file `kernels` names.
    """
    candidates = range(first, min(last, _kernels_first(kernels, last)))
    for port in random.sample(candidates, min(TRIES, len(candidates))):
        if _bound(port):
            return port
    return _bound(0)


def _kernels_first(file: Path, last: int) -> int:
    """The first of the kernel's ports; `last` where the host does not say."""
    try:
        return int(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return last


def _bound(port: int) -> int:
    """The port that a socket was bound to for a moment; 0 where it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return 0
        found: int = probe.getsockname()[1]
        return found


def own_addresses() -> dict[str, str]:
    """Address → interface of this host."""
    import psutil

    return {
        item.address: interface
        for interface, items in psutil.net_if_addrs().items()
        for item in items
        if item.family in (socket.AF_INET, socket.AF_INET6) and "%" not in item.address  # Of one cable alone.
    }


def outward_addresses() -> dict[str, str]:
    """The same without those of the loopback."""
    return {
        address: interface
        for address, interface in own_addresses().items()
        if not ipaddress.ip_address(address).is_loopback
    }


def keep_collectives_at(listen: str) -> None:
    """Has Gloo and NCCL listen on the interface of the address that this service listens at.

    One that listens everywhere leaves the choice to them: an interface of a container may be another one by the time
    that a group forms. NCCL takes a name for the beginning of one, unless "=" stands before it. What the environment
    says stays.
    """
    host, _ = split_address(listen)
    if interface := own_addresses().get(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
