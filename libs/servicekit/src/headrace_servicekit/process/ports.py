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
