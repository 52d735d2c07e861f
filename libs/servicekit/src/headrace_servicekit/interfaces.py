"""Network interfaces of this host, and which of them collectives take. Knows no torch."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil

from headrace_servicekit.rpc.addresses import split_address


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
