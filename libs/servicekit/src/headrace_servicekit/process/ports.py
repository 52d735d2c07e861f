"""Free ports of the loopback interface, for processes that bind them later. Knows no process."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that the kernel chooses where a process asks for any: a listener on port 0, an outgoing connection."""
TRIES = 50


def free_port() -> int:
    """A free port; if possible, one that the kernel does not choose by itself.

    Whoever binds it does so seconds later, and again after each restart: one of the kernel's may be taken by then.
    """
    candidates = range(FIRST, min(LAST, _kernels_first()))
    for port in random.sample(candidates, min(TRIES, len(candidates))):
        if _bound(port):
            return port
    return _bound(0)


def _kernels_first() -> int:
    """The first of the kernel's ports; beyond ours where the host does not say."""
    try:
        return int(KERNELS_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST


def _bound(port: int) -> int:
    """The port that a socket was bound to for a moment; 0 where it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return 0
        found: int = probe.getsockname()[1]
        return found
