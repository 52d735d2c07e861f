"""Several hosts in one fleet: addresses of this one, and what a host that joins must know of the head."""

from __future__ import annotations

import os
import socket
import time
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from headrace.client import Client, HeadraceError
from headrace_servicekit.instance_config import open_to_others
from headrace_servicekit.rpc.addresses import LOOPBACK, host_port, outward_addresses, split_address
from headrace_servicekit.rpc.errors import ServiceError

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import DEFAULT_PORT, Head

CLOCK_S = 5.0
"""Clocks that differ by more are told of: times in logs and events of the two hosts then disagree."""
NO_ADDRESS = "name the address of this host at which the others reach it"


def require_own_address(option: str, address: str) -> None:
    """Raises CommandError (exit code 2) unless other hosts can reach this one there."""
    known = outward_addresses()
    if address not in known:
        raise user_error(
            option, f"{address!r} is no address of this host", f"{NO_ADDRESS}: {', '.join(known) or 'none'}"
        )


def address_towards(head: str) -> str:
    """The address of this host from which the head is reached."""
    try:
        family, _, _, _, place = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # Sends nothing: the kernel chooses the route.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise user_error(
            "HEAD", f"{head!r} cannot be reached ({error.strerror or error})", "correct the address"
        ) from error


def head_place(text: str) -> tuple[str, str]:
    """Host and HTTP port of HOST or HOST:PORT. Raises CommandError (exit code 2)."""
    try:
        return split_address(text, DEFAULT_PORT)
    except ServiceError as error:
        raise user_error("HEAD", error.message, "write HOST, HOST:PORT or [IPV6]:PORT") from error


def join_command(url: str, place: DataDir) -> str:
    """What other hosts are told to run to join the fleet at `url` of this data directory; empty on the loopback."""
    scheme, _, head = url.partition("://")
    if urlsplit(url).hostname == LOOPBACK:
        return ""
    trusted = ""
    if scheme == "https" and place.authority is not None:
        from headrace_servicekit.rpc.certificates import fingerprint

        pem = place.authority.read_bytes()
        ours = place.authority_keys / place.authority.name
        made = ours.is_file() and ours.read_bytes() == pem
        trusted = f" --fingerprint {fingerprint(pem)}" if made else " --tls-files DIRECTORY-OF-THAT-HOST"
    return f"headrace join {head} --token-file token{trusted}"


def find_head(text: str, token_file: Path, ca_file: Path | None = None) -> tuple[Head, list[str]]:
    """The head at HOST or HOST:PORT of its HTTP API, and what to tell of it; encrypted with `ca_file`.

    Raises CommandError: exit code 2 for another version, a token that is not there and a certificate that is not
    trusted, 1 where nobody answers.
    """
    host, port = head_place(text)
    url = f"{'https' if ca_file else 'http'}://{host_port(host, port)}"
    file = Path(os.path.expanduser(token_file)).absolute()
    if not file.is_file():
        fix = "copy `token` of the head's data directory to this host, readable by you alone, and name it"
        raise user_error("--token-file", f"{file} is not there", fix)
    if wide := open_to_others(file):
        raise user_error("--token-file", wide, f"run chmod 600 {file}")
    before = time.time()
    try:
        with Client(url, timeout_s=10, patience_s=0, ca_file=ca_file) as client:
            health = client.require_health()
    except HeadraceError as error:
        if error.reason == "TLS":
            fix = "name the head's tls/ca.pem with --ca-file, or --fingerprint; neither where it is not encrypted"
            raise user_error("HEAD", error.message, fix) from error
        hint = f"start the head with: headrace up --listen {host}"
        raise CommandError(f"{error.message}; {hint}", reason="UNREACHABLE") from error
    own = version("headrace")
    if health.version != own:
        fix = f"install {health.version} here"
        raise user_error("HEAD", f"{text} runs Headrace {health.version}, this host {own}", fix)
    told = []
    if (apart := abs(health.time - (before + time.time()) / 2)) > CLOCK_S:
        told.append(f"the clocks of the two hosts are {apart:.0f} s apart: times of their logs disagree")
    return Head(url, host_port(host, health.grpc_port), str(file)), told
