"""At which address and ports of the first node the others reach a fleet."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from headrace_cli.errors import user_error
from headrace_servicekit.rpc.addresses import outward_addresses

FIRST, COUNT = 20_000, 6_000
"""Ports of jobs: pairs below those that the kernel chooses by itself. Jobs of one array have ids side by side."""
TRIES = 100


def own_address(interface: str, told: str, known: Mapping[str, str] | None = None) -> str:
    """An address of this node: of an interface, else the one that Slurm uses (`told`), else the first that leads out.

    One of IPv4 where there are both. Raises CommandError (exit code 2) where there is none.
    """
    known = outward_addresses() if known is None else known
    if interface:
        fitting = [address for address, name in known.items() if name == interface]
        if not fitting:
            names = ", ".join(sorted({*known.values()})) or "none"
            raise user_error(
                "--interface", f"{interface!r} of this node has no address", f"name one of: {names}"
            )
    else:
        fitting = [address for address in _resolved(told) if address in known] or [*known]
        if not fitting:
            problem = "this node has no address that other nodes reach"
            raise user_error("--interface", problem, "see `ip address` there")
    return min(fitting, key=lambda address: ":" in address)


def _resolved(name: str) -> list[str]:
    try:
        return (
            [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
            if name
            else []
        )
    except OSError:
        return []


def free_ports(address: str, job: int, asked: int) -> int:
    """The first of two free ports at an address; the one that is asked for is not tried."""
    if asked:
        return asked
    for attempt in range(TRIES):
        port = FIRST + 2 * ((job + attempt) % COUNT)
        if all(_is_free(address, each) for each in (port, port + 1)):
            return port
    raise user_error(
        "--port", f"{TRIES} pairs of ports of {address} are in use", "name a free one with --port"
    )


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
