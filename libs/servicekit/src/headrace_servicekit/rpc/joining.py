"""How a host gets the certificates of its processes from the head, by a secret that both have and neither sends.

Each side proves the secret over what it says, so that the way between them need not be encrypted. Services never have
the secret: what they share, the fleet's token, is derived from it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from headrace_servicekit.rpc.certificates import BadCertificate, certify, names_of
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.roles import JOINING, identity
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE

PATH = "/join"
COMMON = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names that every host may have."""


def services_token(secret: str) -> str:
    """The token of the fleet's services: who has it alone cannot join a host."""
    return hmac.new(secret.encode(), b"token of services", hashlib.sha256).hexdigest()


def asking(secret: str, host: str, requests: Mapping[str, bytes]) -> dict[str, Any]:
    """What a host sends: requests (PEM) by role."""
    document = {
        "nonce": secrets.token_hex(16),
        "host": host,
        "requests": {role: pem.decode("ascii") for role, pem in requests.items()},
    }
    return {**document, "proof": _proof(secret, "asks", document)}


def answered(secret: str, asked: Mapping[str, Any], answer: Any) -> tuple[bytes, dict[str, bytes]]:
    """The authority and the certificates by role. Raises BadCertificate where the head has not proven the secret."""
    try:
        authority, certificates = str(answer["authority"]), dict(answer["certificates"])
        document = {"authority": authority, "certificates": certificates}
        expected = _proof(secret, "answers", {**document, "nonce": asked["nonce"]})
        proven = hmac.compare_digest(str(answer["proof"]), expected)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCertificate("it is no answer of a head") from error
    if not proven or set(certificates) != set(asked["requests"]):
        raise BadCertificate(
            "who answers does not have the secret of --token-file: it is another fleet's head"
        )
    pems = {role: str(pem).encode("ascii") for role, pem in certificates.items()}
    return authority.encode("ascii"), pems


def admit(
    authority: Path, own: Path, secret: str, asked: Mapping[str, Any], peer: str = ""
) -> dict[str, Any]:
    """The head's answer, by the authority in a folder; `own` has the files of the head itself. Who asks from an address
    of the head's, `peer`, is on its machine and has that address too.

    Raises ServiceError UNAUTHENTICATED for a wrong proof, INVALID for requests that the head does not sign.
    """
    document = {key: asked[key] for key in ("nonce", "host", "requests")}
    if not hmac.compare_digest(asked["proof"].encode(), _proof(secret, "asks", document).encode()):
        message = "the proof is wrong; copy `token` of the head's data directory anew, and name it with --token-file"
        raise ServiceError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", message)
    heads = _names((own / CERTIFICATE).read_bytes())
    known = identity(heads)
    taken = {*heads} - {*COMMON, peer}
    if known is not None and known.host == asked["host"]:
        raise _invalid(f"{known.host!r} is the head's own name; give this host another with --name")
    signed = {}
    for role, pem in asked["requests"].items():
        if role not in JOINING:
            raise _invalid(f"{role!r} is none of {', '.join(JOINING)}")
        signed[role] = _signed(authority, pem, role, str(asked["host"]), taken)
    answer = {"authority": (authority / AUTHORITY).read_text("ascii"), "certificates": signed}
    return {**answer, "proof": _proof(secret, "answers", {**answer, "nonce": document["nonce"]})}


def _signed(authority: Path, pem: str, role: str, host: str, heads: Collection[str]) -> str:
    """The certificate. Raises ServiceError INVALID; `heads`: names that are the head's alone."""
    try:
        certificate = certify(authority, pem.encode(), (role,))
        names = _names(certificate)
        found = identity(names)
        if found is None or found.host != host or host == "*":
            raise BadCertificate(
                f"it is for {found.uri if found else 'nobody'}, not for a process of host {host!r}"
            )
        if taken := {*names} & {*heads}:
            raise BadCertificate(f"{', '.join(sorted(taken))} is the head's own")
    except BadCertificate as error:
        raise _invalid(f"the {role}'s request: {error}") from error
    return certificate.decode("ascii")


def _names(pem: bytes) -> list[str]:
    return names_of(x509.load_pem_x509_certificate(pem))


def _invalid(problem: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", problem)


def _proof(secret: str, what: str, document: Mapping[str, Any]) -> str:
    said = json.dumps({"what": what, **document}, sort_keys=True).encode()
    return hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()
