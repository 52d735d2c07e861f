"""Encryption of a process's gRPC traffic, where HEADRACE_TLS_DIR names a directory with its files; else there is none.

The directory has `ca.pem`, which the other side's certificate must come from, and this host's own `host.pem` and
`host-key.pem`. A running server shows the newest `host.pem`. Who may do what is a matter of the token.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc

from headrace_servicekit.rpc.errors import ServiceError

VARIABLE = "HEADRACE_TLS_DIR"
NAME_VARIABLE = "HEADRACE_TLS_NAME"
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "host.pem", "host-key.pem"


def tls_dir() -> Path | None:
    """The directory of this process's files; None: nothing is encrypted."""
    return Path(named) if (named := os.environ.get(VARIABLE)) else None


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


def name_options() -> list[tuple[str, str]]:
    """gRPC channel arguments: the name that others' certificates are for, where they are not for their addresses."""
    name = os.environ.get(NAME_VARIABLE)
    return [("grpc.ssl_target_name_override", name)] if name and tls_dir() else []


def channel_credentials() -> grpc.ChannelCredentials | None:
    """What a client trusts. Raises ServiceError TLS_FILES."""
    folder = tls_dir()
    return grpc.ssl_channel_credentials(_read(folder / AUTHORITY)) if folder else None


def server_credentials() -> grpc.ServerCredentials | None:
    """What a server shows: at each handshake the newest files. Raises ServiceError TLS_FILES."""
    folder = tls_dir()
    if folder is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(_read(folder / KEY), _read(folder / CERTIFICATE))])

    changed = _changes(folder / CERTIFICATE)
    # None: as before. gRPC's types do not know it.
    return grpc.dynamic_ssl_server_credentials(read(), lambda: read() if changed() else None)  # type: ignore[arg-type,return-value]


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
            f"{VARIABLE}: {file} cannot be read ({error.strerror}); headrace up --tls makes such a directory",
        ) from error
