"""Network interfaces of this host, and which of them collectives take. Knows no torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

from headrace_servicekit.rpc.addresses import advertised_host, split_address


def own_addresses() -> dict[str, str]:
    """Address → interface of this host."""
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
        if not ip_address(address).is_loopback
    }


def keep_collectives_at(listen: str, advertise: str) -> None:
    """Has Gloo and NCCL listen on the interface at which this service is reached; they would choose one themselves.

    NCCL takes a name for the beginning of one, unless "=" stands before it. What the environment says stays.
    """
    host, _ = split_address(listen)
    known = own_addresses()
    if host not in known:
        host = advertised_host(listen, advertise)
        with suppress(OSError):
            found = [place[0] for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
            host = next((str(address) for address in found if address in known), host)
    if interface := known.get(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
