"""The files of an encrypted fleet: made by `up`, asked for by `join`, or given by the user."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace_servicekit.process.ports import LOOPBACK
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    check_files,
    fingerprint,
    make_authority,
    request_certificate,
)
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, KEY, VARIABLE

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.plan import Head

CERTIFY_S = 20.0


def make_files(folder: Path, address: str) -> str:
    """The authority of a fleet, kept from start to start, and a new certificate of its head; the fingerprint."""
    make_authority(folder)
    request = request_certificate(folder, _names(address))
    (folder / CERTIFICATE).write_bytes(certify(folder, request))
    return fingerprint((folder / AUTHORITY).read_bytes())


def take_files(given: Path, folder: Path, address: str) -> None:
    """Copies a user's files. Raises CommandError (exit code 2) for those that others would refuse at `address`."""
    try:
        check_files(given, address)
    except BadCertificate as error:
        fix = f"give {AUTHORITY}, {CERTIFICATE} with this host's address among its names, and {KEY}"
        raise user_error("--tls-files", str(error), fix) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in (AUTHORITY, CERTIFICATE, KEY):
        (folder / file).unlink(missing_ok=True)
        shutil.copyfile(given / file, folder / file)
        (folder / file).chmod(0o600)


def trust(folder: Path, url: str, ca_file: Path | None, pinned: str) -> Path:
    """The authority that the head's certificate must come from: a file, or what the head shows, if that is pinned.

    Raises CommandError: exit code 2 for a file or a fingerprint that is not the head's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        shown = (
            ca_file.read_bytes()
            if ca_file
            else httpx.get(f"{url}/ca.pem", verify=False, trust_env=False).content
        )
        found = fingerprint(shown)
    except (OSError, BadCertificate) as error:
        raise user_error(
            "--ca-file", f"{ca_file}: {error}", "copy tls/ca.pem of the head's data directory"
        ) from error
    except httpx.TransportError as error:
        raise CommandError(f"no coordinator answers at {url} ({error})", reason="UNREACHABLE") from error
    wanted = pinned.lower().replace(":", "")
    if wanted and found != wanted:
        fix = (
            "read it off the head's `headrace up`; if that is the same, somebody else answers at this address"
        )
        raise user_error("--fingerprint", f"{url} shows {found}, not {wanted}", fix)
    (folder / AUTHORITY).write_bytes(shown)
    return folder / AUTHORITY


def ask_for_certificate(folder: Path, head: Head, address: str) -> None:
    """This host's certificate, by the head. Raises CommandError."""
    request = request_certificate(folder, _names(address))
    token = Path(head.token_file).read_text(encoding="ascii").strip()
    with _using(folder):
        try:
            answer = asyncio.run(_certify(head.grpc_address, token, request))
        except grpc.aio.AioRpcError as error:
            option = "--token-file" if error.code() is grpc.StatusCode.UNAUTHENTICATED else "HEAD"
            raise user_error(
                option, f"{head.grpc_address} gives no certificate: {message_of(error)}", "see the head's log"
            ) from error
    (folder / CERTIFICATE).write_bytes(answer)


async def _certify(address: str, token: str, request: bytes) -> bytes:
    async with dial(address, token=token) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Certify(fleet_pb2.CertifyRequest(request=request), timeout=CERTIFY_S)
        return bytes(answer.certificate)


@contextmanager
def _using(folder: Path) -> Iterator[None]:
    """This process speaks TLS meanwhile."""
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def _names(address: str) -> list[str]:
    """Of a host: the address for the others, and those of the loopback."""
    return list(dict.fromkeys([address, socket.gethostname(), "localhost", LOOPBACK, "::1"]))
