"""A fleet's own certificate authority: makes it, certifies roles of hosts, and says what is wrong with a certificate.

python -m headrace_servicekit.rpc.certificates FOLDER makes a folder for each role, for containers that share nothing.
Imports `cryptography`; keys never leave the host that has made them.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_servicekit.rpc.roles import ANY_HOST, COORDINATOR, ROLES, SCHEME, Identity, identity
from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, COORDINATOR_NAME, INSTANCE_NAME, KEY, NAMES

AUTHORITY_KEY = "ca-key.pem"
AUTHORITY_DAYS, HOST_DAYS = 3650, 7
_EARLIER = datetime.timedelta(days=1)
"""Clocks of hosts differ."""


class BadCertificate(ValueError):
    """Why files or a request cannot be used; the sentence names the file and the fix."""


def make_authority(folder: Path, host: str, fleet: str = "") -> None:
    """`ca.pem` and `ca-key.pem`, where there are none yet.

    The certificate names the fleet, spiffe://FLEET, and says which names the authority may sign for, and clients hold
    it to that: `localhost`, that of the head's host, and those of services. It may sign for every address.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / AUTHORITY_KEY).exists() and may_certify(folder, COORDINATOR_NAME):
        return
    names = [x509.DNSName(name) for name in dict.fromkeys(("localhost", host, NAMES))]
    key = ec.generate_private_key(ec.SECP256R1())
    fleet = fleet or f"headrace-{secrets.token_hex(8)}"
    name = _common_name(f"Headrace fleet {fleet}")
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.NameConstraints(names, None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(SCHEME + fleet)]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / AUTHORITY_KEY, key)
    (folder / AUTHORITY).write_bytes(_pem(certificate))


def may_certify(folder: Path, name: str) -> bool:
    """Whether clients take what the authority in `folder` signs for a name."""
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    return _within(_general_name(name), _permitted_names(authority))


def fleet_of(pem: bytes) -> str:
    """The fleet that an authority's certificate names, or a process's; "" where it names none."""
    names = names_of(x509.load_pem_x509_certificate(pem))
    found = [name.removeprefix(SCHEME).partition("/")[0] for name in names if name.startswith(SCHEME)]
    return found[0] if len(found) == 1 else ""


def names_for(known: Identity, addresses: Sequence[str]) -> list[str]:
    """What stands in the certificate of a role: whom it is for, the name by which it is called, addresses."""
    service = COORDINATOR_NAME if known.role == COORDINATOR else INSTANCE_NAME
    return list(dict.fromkeys([known.uri, service, *addresses]))


def service_name(folder: Path) -> str:
    """The name by which the process with these files is called."""
    names = names_of(x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes()))
    return COORDINATOR_NAME if COORDINATOR_NAME in names else INSTANCE_NAME


def make_certificate(
    authority: Path,
    folder: Path,
    role: str,
    host: str,
    addresses: Sequence[str] = (),
    days: float | None = None,
) -> None:
    """A new key and certificate of a role at a host, with the authority's own, in `folder`."""
    pem = (authority / AUTHORITY).read_bytes()
    request = request_certificate(folder, names_for(Identity(fleet_of(pem), role, host), addresses))
    (folder / AUTHORITY).write_bytes(pem)
    put_certificate(folder, certify(authority, request, days=days))


def request_certificate(folder: Path, names: Sequence[str]) -> bytes:
    """A new key for this process, `host-key.pem`, and the request (PEM) for a certificate with these names."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(folder / KEY, key)
    return _request(key, names)


def request_renewal(folder: Path) -> bytes | None:
    """The request for another certificate of the same key and names; None before half of its life is over."""
    own = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    half = (own.not_valid_after_utc - own.not_valid_before_utc) / 2
    if datetime.datetime.now(datetime.UTC) < own.not_valid_before_utc + half:
        return None
    return _request(_private_key(folder / KEY), names_of(own))


def put_certificate(folder: Path, certificate: bytes) -> None:
    """The host's certificate, in place of the one before it at once: servers read it while they run."""
    fresh = folder / f".{CERTIFICATE}"
    fresh.write_bytes(certificate)
    fresh.replace(folder / CERTIFICATE)


def certify(folder: Path, request: bytes, roles: Collection[str] = ROLES, days: float | None = None) -> bytes:
    """The certificate (PEM) that a request asks for, by the authority in `folder`, if it is for one of these roles.

    It lives for HOST_DAYS unless `days` says otherwise. Raises BadCertificate.
    """
    try:
        asked = x509.load_pem_x509_csr(request)
        names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise BadCertificate("it is no request for a certificate with names of a host") from error
    if not asked.is_signature_valid:
        raise BadCertificate("the request is not signed by the key that it names")
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    signed_for = _permitted_names(authority)
    _check_identity([str(name.value) for name in names.value], fleet_of(_pem(authority)), roles)
    for name in names.value:
        if not _within(name, signed_for):
            raise BadCertificate(
                f"this fleet's authority signs for addresses, {' and '.join(signed_for)}, not for {name.value}"
            )
    key = _private_key(folder / AUTHORITY_KEY)
    subject = _common_name(str(next(iter(names.value)).value).removeprefix(SCHEME))
    certificate = (
        _builder(subject, authority.subject, asked.public_key(), HOST_DAYS if days is None else days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(names.value, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate)


def _check_identity(names: Sequence[str], fleet: str, roles: Collection[str]) -> None:
    known = identity(names)
    if known is None or known.fleet != fleet or known.role not in roles:
        wanted = f"{SCHEME}{fleet}/ROLE/HOST, ROLE one of {', '.join(roles)}"
        raise BadCertificate(f"the request must name its holder as {wanted}; it names {', '.join(names)}")
    if (COORDINATOR_NAME in names) != (known.role == COORDINATOR):
        raise BadCertificate(f"{COORDINATOR_NAME} is the coordinator's name, not that of {known.uri}")


def check_files(folder: Path, role: str, name: str = "") -> None:
    """Refuses files of a role that others would refuse, at an address where `name` is one. Raises BadCertificate."""
    read = {}
    for file in (AUTHORITY, CERTIFICATE):
        path = folder / file
        try:
            read[file] = x509.load_pem_x509_certificate(path.read_bytes())
        except OSError as error:
            raise BadCertificate(f"{path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise BadCertificate(f"{path} holds no certificate in PEM") from error
    now = datetime.datetime.now(datetime.UTC)
    for file, certificate in read.items():
        if certificate.not_valid_after_utc < now:
            raise BadCertificate(f"{folder / file} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    own = read[CERTIFICATE]
    try:
        own.verify_directly_issued_by(read[AUTHORITY])
    except (ValueError, TypeError, InvalidSignature) as error:
        raise BadCertificate(
            f"{folder / CERTIFICATE} does not come from the authority of {folder / AUTHORITY}"
        ) from error
    names = names_of(own)
    service = COORDINATOR_NAME if role == COORDINATOR else INSTANCE_NAME
    for needed in filter(None, (service, name)):
        if needed not in names:
            shown = ", ".join(names) or "no name"
            raise BadCertificate(f"{folder / CERTIFICATE} is for {shown}, not for {needed}")
    known = identity(names)
    if known is None or known.role != role:
        raise BadCertificate(f"{folder / CERTIFICATE} has no URI {SCHEME}FLEET/{role}/HOST among its names")
    try:
        key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise BadCertificate(f"{folder / KEY} cannot be read as a key without a password") from error
    if _public(key.public_key()) != _public(own.public_key()):
        raise BadCertificate(f"{folder / KEY} is not the key of {folder / CERTIFICATE}")


def names_of(certificate: x509.Certificate) -> list[str]:
    """Names and addresses of a host's certificate."""
    with suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in found]
    return []


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, as 64 hexadecimal digits. Raises BadCertificate."""
    try:
        return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()
    except ValueError as error:
        raise BadCertificate("it is no certificate in PEM") from error


def _builder(subject: x509.Name, issuer: x509.Name, key: object, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _request(key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> bytes:
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_common_name(names[0].removeprefix(SCHEME)))
        .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM)


def _permitted_names(authority: x509.Certificate) -> list[str]:
    """None where it says nothing: such an authority is not one of ours."""
    with suppress(x509.ExtensionNotFound):
        found = authority.extensions.get_extension_for_class(x509.NameConstraints).value
        return [str(each.value) for each in found.permitted_subtrees or ()]
    return []


def _within(name: x509.GeneralName, permitted: Sequence[str]) -> bool:
    """An address is: gRPC's TLS library refuses all certificates below an authority with constraints on addresses."""
    if isinstance(name, x509.DNSName):
        return any(f".{name.value.lower()}".endswith(f".{each.lower()}") for each in permitted)
    return isinstance(name, x509.IPAddress | x509.UniformResourceIdentifier)


def _general_name(text: str) -> x509.GeneralName:
    if text.startswith(SCHEME):
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _public(key: object) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)  # type: ignore[attr-defined,no-any-return]


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(serialization.Encoding.PEM, form, none))


def main(argv: Sequence[str] | None = None) -> int:
    """Makes an authority and the files of roles, where there are none or half of their life is over."""
    parser = argparse.ArgumentParser(
        prog="headrace-certificates", description="Makes FOLDER/authority and FOLDER/ROLE for each role."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fleet", default="", help="the fleet's name in certificates; default: a fresh one")
    parser.add_argument(
        "--host", default=ANY_HOST, help="of their holders; default: any container of the role"
    )
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="default: all")
    parser.add_argument("--days", type=float, default=HOST_DAYS, help="for which they live")
    arguments = parser.parse_args(argv)
    authority = arguments.folder / "authority"
    make_authority(authority, "localhost", arguments.fleet)
    for role in arguments.roles:
        folder = arguments.folder / role
        try:
            check_files(folder, role)
            fresh = request_renewal(folder) is None
        except BadCertificate:
            fresh = False
        if not fresh:
            make_certificate(authority, folder, role, arguments.host, ["localhost"], arguments.days)
            print(f"{folder}: a certificate of {role} for {arguments.days:g} days")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
