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
from headrace_servicekit.folders import own_folder
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.addresses import LOOPBACK
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    check_files,
    fingerprint,
    make_authority,
    may_certify,
    put_certificate,
    request_certificate,
    request_renewal,
)
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, KEY, VARIABLE

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import Head

CERTIFY_S = 20.0
RENEWAL_S = 3600.0
_logger = get_logger(__name__)


def make_files(place: DataDir, address: str) -> str:
    """The authority of a fleet, kept from start to start, and a new certificate of its head; the fingerprint.

    Raises CommandError (exit code 2) where the folder for the authority's key cannot be written.
    """
    keys, name = place.authority_keys, socket.gethostname()
    try:
        own_folder(keys.parent, "name a directory of yours in XDG_CONFIG_HOME")  # others may write above it
        make_authority(keys, name)
    except OSError as error:
        problem = f"the key of the fleet's authority cannot be kept in {keys} ({error.strerror or error})"
        raise user_error("--tls", problem, "name a directory of yours in XDG_CONFIG_HOME") from error
    request = request_certificate(place.tls, [*_names(address), *([name] if may_certify(keys, name) else [])])
    put_certificate(place.tls, certify(keys, request))
    shutil.copyfile(keys / AUTHORITY, place.tls / AUTHORITY)
    return fingerprint((keys / AUTHORITY).read_bytes())


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
    with _using(folder):
        try:
            answer = asyncio.run(_certify(head, request))
        except grpc.aio.AioRpcError as error:
            option = "--token-file" if error.code() is grpc.StatusCode.UNAUTHENTICATED else "HEAD"
            raise user_error(
                option, f"{head.grpc_address} gives no certificate: {message_of(error)}", "see the head's log"
            ) from error
    put_certificate(folder, answer)


async def keep_certified(place: DataDir, head: Head | None) -> None:
    """Renews this host's certificate, by the authority or by the head, when half of its life is over; for ever."""
    while True:
        await asyncio.sleep(RENEWAL_S)
        await renew(place, head)


async def renew(place: DataDir, head: Head | None) -> None:
    """Renews it if half of its life is over; what goes wrong is logged, and tried again."""
    try:
        if (request := request_renewal(place.tls)) is None:
            return
        if head is None:
            answer = certify(place.authority_keys, request)
        else:
            answer = await _certify(head, request)
        put_certificate(place.tls, answer)
        _logger.info("certificate renewed")
    except (OSError, ValueError, grpc.aio.AioRpcError) as error:
        why = message_of(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
        _logger.warning("the certificate of this host is not renewed", extra={"why": why})


async def _certify(head: Head, request: bytes) -> bytes:
    token = await asyncio.to_thread(Path(head.token_file).read_text, encoding="ascii")
    async with dial(head.grpc_address, token=token.strip()) as channel:
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
    return list(dict.fromkeys([address, "localhost", LOOPBACK, "::1"]))
