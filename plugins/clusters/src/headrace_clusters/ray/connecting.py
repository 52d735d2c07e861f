"""Connects to a Ray cluster, or says in one sentence why not, before anything waits."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace_cli.errors import CommandError, user_error
from headrace_servicekit.rpc.addresses import parse_address

KEY = "--on"
CLIENT = "ray://"
CLIENT_PORT = 10001
REACH_S = 5.0
CONNECT_S = 30.0
GRACE_S = "15"
"""Over ray://, how long Ray keeps what a driver started after that one is gone, in seconds."""


def require_ray() -> str:
    """The version of the Ray that is installed here. Raises CommandError (exit code 2) where there is none."""
    try:
        return version("ray")
    except PackageNotFoundError as error:
        raise user_error(KEY, "Ray is not installed here", "pip install 'headrace[ray]'") from error


def cluster_address(rest: str) -> str:
    """The cluster that `--on ray…` names, as `ray.init` takes it. Raises CommandError (exit code 2)."""
    if not rest:
        return os.environ.get("RAY_ADDRESS") or "auto"
    found = parse_address(rest, CLIENT_PORT)
    if found is None:
        raise user_error(KEY, f"{rest!r} is no address", "write ray, or ray://HOST or ray://HOST:PORT")
    host, port = found
    return f"{CLIENT}[{host}]:{port}" if ":" in host else f"{CLIENT}{host}:{port}"


def require_reachable(address: str) -> None:
    """Raises CommandError where nothing listens at a cluster's address; Ray itself would try for a minute."""
    found = parse_address(address.removeprefix(CLIENT)) if address not in ("auto", "local") else None
    if found is None:
        return
    try:
        socket.create_connection((found[0], int(found[1])), REACH_S).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error) or "no answer") from error


def connect(address: str) -> Any:
    """The module `ray`, connected to a cluster. Raises CommandError in time, with exit code 2 for another release."""
    require_ray()
    require_reachable(address)
    os.environ.setdefault("RAY_CLIENT_RECONNECT_GRACE_PERIOD", GRACE_S)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(int(CONNECT_S)))
    import ray

    with _InTime(address):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, TimeoutError) as error:
            raise _unreachable(address, _first_line(error)) from error
        except RuntimeError as error:
            raise _refusal(address, str(error)) from error
    return ray


def _refusal(address: str, text: str) -> CommandError:
    """Of releases that differ, or of a cluster that does not answer as Ray."""
    if "ersion mismatch" not in text and "ersions do not match" not in text and "Ray: " not in text:
        return _unreachable(address, _first_line(text))
    import ray

    lines = [line.partition("Ray:")[2].strip() for line in text.splitlines() if "Ray:" in line]
    pythons = [line.partition("Python:")[2].strip() for line in text.splitlines() if "Python:" in line]
    theirs, python = (*lines, "another release")[0], (*pythons, "")[0]
    of_python = f" on Python {python}" if python else ""
    problem = f"the cluster runs Ray {theirs}{of_python}, this process Ray {ray.__version__}"
    return user_error(KEY, problem, "use the cluster's releases of both here, such as its image")


def _unreachable(address: str, why: str) -> CommandError:
    where = (
        "no Ray cluster runs on this machine" if address == "auto" else f"no Ray cluster answers at {address}"
    )
    fix = "start one (ray start --head), or name its head: ray://HOST, or RAY_ADDRESS=HOST:6379 on one of its nodes"
    return CommandError(f"{KEY}: {where} ({why}); {fix}", reason="UNREACHABLE")


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no answer").rstrip(".")


class _InTime:
    """Ends the process with the sentence where Ray neither connects nor fails."""

    def __init__(self, address: str, patience_s: float = 2 * CONNECT_S) -> None:
        self._timer = threading.Timer(patience_s, self._end, (address, patience_s))
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self, address: str, patience_s: float) -> None:
        from headrace_clusters.ray.driver import tell

        with suppress(OSError):
            tell({"error": _unreachable(address, f"no answer within {patience_s:g} s").message})
        os._exit(1)
