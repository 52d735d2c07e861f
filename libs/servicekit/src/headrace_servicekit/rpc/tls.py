"""Encryption of a process's gRPC traffic, where HEADRACE_TLS_DIR names a directory with its files; else there is none.

The directory has `ca.pem`, which the other side's certificate must come from, and this host's own `host.pem` and
`host-key.pem`. Who may do what is a matter of the token.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from headrace_servicekit.rpc.errors import ServiceError

VARIABLE = "HEADRACE_TLS_DIR"
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "host.pem", "host-key.pem"


def tls_dir() -> Path | None:
    """The directory of this process's files; None: nothing is encrypted."""
    return Path(named) if (named := os.environ.get(VARIABLE)) else None


def channel_credentials() -> grpc.ChannelCredentials | None:
    """What a client trusts. Raises ServiceError TLS_FILES."""
    folder = tls_dir()
    return grpc.ssl_channel_credentials(_read(folder / AUTHORITY)) if folder else None


def server_credentials() -> grpc.ServerCredentials | None:
    """What a server shows. Raises ServiceError TLS_FILES."""
    folder = tls_dir()
    if folder is None:
        return None
    return grpc.ssl_server_credentials([(_read(folder / KEY), _read(folder / CERTIFICATE))])


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "TLS_FILES",
            f"{VARIABLE}: {file} cannot be read ({error.strerror}); headrace up --tls makes such a directory",
        ) from error
