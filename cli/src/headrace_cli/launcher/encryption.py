"""The certificates of a fleet's processes: made by `up`, asked for by `join`, or given by the user."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from headrace_servicekit.folders import own_folder
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.addresses import LOOPBACK
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    check_files,
    fingerprint,
    fleet_of,
    make_authority,
    make_certificate,
    may_certify,
    names_for,
    put_certificate,
    request_certificate,
    request_renewal,
)
from headrace_servicekit.rpc.joining import PATH, answered, asking
from headrace_servicekit.rpc.roles import COORDINATOR, INSTANCES, JOINING, SUPERVISOR, Identity
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, KEY

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import FleetPlan, Head

ASK_S = 20.0
RENEWAL_S = 3600.0
_logger = get_logger(__name__)


def make_files(place: DataDir, address: str, host: str) -> str:
    """The authority of a fleet, kept from start to start, and new certificates of its head; the fingerprint.

    Raises CommandError (exit code 2) where the folder for the authority's key cannot be written.
    """
    keys, name = place.authority_keys, socket.gethostname()
    try:
        own_folder(keys.parent, "name a directory of yours in XDG_CONFIG_HOME")  # others may write above it
        make_authority(keys, name)
    except OSError as error:
        problem = f"the key of the fleet's authority cannot be kept in {keys} ({error.strerror or error})"
        raise user_error("--listen", problem, "name a directory of yours in XDG_CONFIG_HOME") from error
    authority = (keys / AUTHORITY).read_bytes()
    addresses = [*_addresses(address), *([name] if may_certify(keys, name) else [])]
    for role in (COORDINATOR, *JOINING):
        make_certificate(keys, place.certificates / role, role, host, addresses)
    return fingerprint(authority)


def take_files(given: Path, place: DataDir, plan: FleetPlan) -> None:
    """Copies a user's files, a folder for each role. Raises CommandError (exit code 2) for those that others refuse."""
    kinds = [role for role in INSTANCES if plan.counts.get(role) or (given / role).is_dir()]
    for role in (*(() if plan.head else (COORDINATOR,)), SUPERVISOR, *kinds):
        try:
            check_files(given / role, role, plan.listen)
        except BadCertificate as error:
            fix = f"give {AUTHORITY}, {CERTIFICATE} with this host's address among its names, and {KEY}"
            raise user_error("--tls-files", str(error), f"{fix}, in {given / role}") from error
        folder = place.certificates / role
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in (AUTHORITY, CERTIFICATE, KEY):
            (folder / file).unlink(missing_ok=True)
            shutil.copyfile(given / role / file, folder / file)
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
            else httpx.get(f"{url}/ca.pem", verify=False, trust_env=False).content  # nosec B501 - its fingerprint decides
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


def ask_for_certificates(place: DataDir, plan: FleetPlan) -> None:
    """This host's certificates, by the head. Raises CommandError."""
    assert plan.head is not None
    pem = _asked(plan.head, place, lambda client: client.get("/ca.pem"))
    fleet = fleet_of(pem.content)
    requests = {}
    for role in JOINING:
        names = names_for(Identity(fleet, role, plan.host), _addresses(plan.listen))
        requests[role] = request_certificate(place.certificates / role, names)
    _put(place, *_joined(plan.head, place, plan.host, requests))


async def keep_certified(place: DataDir, plan: FleetPlan) -> None:
    """Renews this host's certificates, by the authority or by the head, when half of their life is over; for ever."""
    while True:
        await asyncio.sleep(RENEWAL_S)
        await asyncio.to_thread(renew, place, plan)


def renew(place: DataDir, plan: FleetPlan) -> None:
    """Renews those of which half of the life is over; what goes wrong is logged, and tried again."""
    try:
        due = {each.name: request_renewal(each) for each in sorted(place.certificates.iterdir())}
        requests = {role: request for role, request in due.items() if request is not None}
        if not requests:
            return
        if plan.head is None:
            authority = (place.authority_keys / AUTHORITY).read_bytes()
            made = {role: certify(place.authority_keys, request) for role, request in requests.items()}
        else:
            authority, made = _joined(plan.head, place, plan.host, requests)
        _put(place, authority, made)
        _logger.info("certificates renewed", extra={"roles": sorted(made)})
    except (OSError, ValueError, CommandError) as error:
        _logger.warning("the certificates of this host are not renewed", extra={"why": str(error)})


def _put(place: DataDir, authority: bytes, made: Mapping[str, bytes]) -> None:
    for role, certificate in made.items():
        (place.certificates / role / AUTHORITY).write_bytes(authority)
        put_certificate(place.certificates / role, certificate)


def _joined(
    head: Head, place: DataDir, host: str, requests: Mapping[str, bytes]
) -> tuple[bytes, dict[str, bytes]]:
    secret = Path(head.token_file).read_text(encoding="ascii").strip()
    asked = asking(secret, host, requests)
    answer = _asked(head, place, lambda client: client.post(PATH, json=asked))
    try:
        return answered(secret, asked, answer.json())
    except (BadCertificate, ValueError) as error:
        raise user_error(
            "--token-file", f"{head.url}: {error}", "copy `token` of the head's data directory"
        ) from error


def _asked(head: Head, place: DataDir, ask: Callable[[httpx.Client], httpx.Response]) -> httpx.Response:
    trusted: ssl.SSLContext | bool = True
    if head.url.startswith("https:") and place.authority is not None:
        trusted = ssl.create_default_context(cafile=str(place.authority))
    try:
        with httpx.Client(base_url=head.url, verify=trusted, trust_env=False, timeout=ASK_S) as client:
            answer = ask(client)
    except httpx.TransportError as error:
        raise CommandError(f"{head.url} gives no certificates: {error}", reason="UNREACHABLE") from error
    if answer.is_success:
        return answer
    option = "--token-file" if answer.status_code == httpx.codes.UNAUTHORIZED else "HEAD"
    raise user_error(option, f"{head.url} gives no certificates: {_why(answer)}", "see the head's log")


def _why(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answers {answer.status_code}"


def _addresses(address: str) -> list[str]:
    """Of a host: the address for the others, and those of the loopback."""
    return list(dict.fromkeys([address, "localhost", LOOPBACK, "::1"]))
