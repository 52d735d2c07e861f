"""Encryption of a process's gRPC traffic, where HEADRACE_TLS_DIR names a directory with its files; else there is none.

The directory has `ca.pem`, which the other side's certificate must come from, and this process's own `host.pem` and
`host-key.pem`, which it shows as a server and as a client. All use the newest files without a restart. Who may call
what is in `roles`.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc

from headrace_servicekit.rpc.addresses import is_loopback, split_address
from headrace_servicekit.rpc.errors import ServiceError

VARIABLE = "HEADRACE_TLS_DIR"
ALL_VARIABLE = "HEADRACE_ENCRYPT_ALL"
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "host.pem", "host-key.pem"
NAMES = "headrace"
"""Domain of the names by which services know each other: at any address."""
COORDINATOR_NAME, INSTANCE_NAME = f"coordinator.{NAMES}", f"instance.{NAMES}"


def tls_dir() -> Path | None:
    """The directory of this process's files; None: nothing is encrypted."""
    return Path(named) if (named := os.environ.get(VARIABLE)) else None


def encrypts_all() -> bool:
    """Whether the user wants more encrypted than gRPC: the HTTP API, and no traffic that cannot be."""
    return tls_dir() is not None and os.environ.get(ALL_VARIABLE) == "1"


def keys_folder() -> Path:
    """Where launchers of this user keep the keys of authorities: no service but a coordinator needs one.

    A user without a home has a folder of its own among the temporary files.
    """
    if settings := os.environ.get("XDG_CONFIG_HOME"):
        return Path(settings) / "headrace"
    home = os.path.expanduser("~")
    return (
        Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
        if home == "~"
        else Path(home, ".config/headrace")
    )


def channel_credentials() -> grpc.ChannelCredentials | None:
    """What a client trusts, and shows. Raises ServiceError TLS_FILES."""
    folder = tls_dir()
    if folder is None:
        return None
    return grpc.ssl_channel_credentials(*map(_read, (folder / AUTHORITY, folder / KEY, folder / CERTIFICATE)))


def client_changes() -> Callable[[], bool]:
    """Whether this process's certificate has been replaced since the last call."""
    folder = tls_dir()
    return _changes(folder / CERTIFICATE) if folder else lambda: False


def server_credentials(*, of_clients: bool = True) -> grpc.ServerCredentials | None:
    """What a server shows, and asks of its clients, if it does: at each handshake the newest files.

    Raises ServiceError TLS_FILES.
    """
    folder = tls_dir()
    if folder is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        own = (_read(folder / KEY), _read(folder / CERTIFICATE))
        return grpc.ssl_server_certificate_configuration([own], _read(folder / AUTHORITY))

    changed = _changes(folder / CERTIFICATE)
    # None: as before. gRPC's types do not know it.
    fetch = lambda: read() if changed() else None  # noqa: E731
    return grpc.dynamic_ssl_server_credentials(read(), fetch, of_clients)  # type: ignore[arg-type,return-value]


def check_listen(listen: str, token: str | None) -> str:
    """The host that a server listens on.

    Raises ServiceError TOKEN_REQUIRED beyond loopback without a token, CERTIFICATE_REQUIRED without TLS's files.
    """
    host, _ = split_address(listen)
    if not token and not is_loopback(host):
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "TOKEN_REQUIRED",
            f"refusing to listen on {listen} without a token: set --token-file "
            "(HEADRACE_TOKEN_FILE) to a file with a secret that the fleet shares, or listen on 127.0.0.1",
        )
    if tls_dir() is None and not is_loopback(host):
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "CERTIFICATE_REQUIRED",
            f"refusing to listen on {listen} without a certificate: set HEADRACE_TLS_DIR to a directory that "
            "python -m headrace_servicekit.rpc.certificates makes for this role, or listen on 127.0.0.1",
        )
    return host


def own_fleet() -> str:
    """The fleet of this process's certificate. Raises ServiceError TLS_FILES where it names none."""
    from headrace_servicekit.rpc.certificates import fleet_of  # takes `cryptography` along

    folder = tls_dir()
    assert folder is not None
    if not (fleet := fleet_of((folder / CERTIFICATE).read_bytes())):
        message = f"{folder / CERTIFICATE} has no URI spiffe://FLEET/ROLE/HOST among its names"
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "TLS_FILES", message)
    return fleet


def server_context(folder: Path) -> ssl.SSLContext:
    """Of a server of HTTP that shows a folder's certificate: at each handshake the newest. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    show_newest(context, folder)
    return context


def show_newest(context: ssl.SSLContext, folder: Path) -> None:
    """The same for a server of HTTP, whose context has the files of now."""
    changed, newest = _changes(folder / CERTIFICATE), context

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        nonlocal newest
        if changed():
            newest = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            newest.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        connection.context = newest

    context.sni_callback = choose


def _changes(file: Path) -> Callable[[], bool]:
    """Whether a file has been replaced since the last call."""
    known = _stamp(file)

    def changed() -> bool:
        nonlocal known
        before, known = known, _stamp(file) or known
        return known != before

    return changed


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "TLS_FILES",
            f"{VARIABLE}: {file} cannot be read ({error.strerror}); "
            "python -m headrace_servicekit.rpc.certificates makes such directories",
        ) from error
