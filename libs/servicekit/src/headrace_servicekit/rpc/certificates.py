"""A fleet's own certificate authority: makes it, certifies hosts, and says what is wrong with a certificate.

Imports `cryptography`; keys never leave the host that has made them.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_servicekit.rpc.tls import AUTHORITY, CERTIFICATE, KEY

AUTHORITY_KEY = "ca-key.pem"
AUTHORITY_DAYS, HOST_DAYS = 3650, 7
_EARLIER = datetime.timedelta(days=1)
"""Clocks of hosts differ."""


class BadCertificate(ValueError):
    """Why files or a request cannot be used; the sentence names the file and the fix."""


def make_authority(folder: Path, host: str) -> None:
    """`ca.pem` and `ca-key.pem`, where there are none yet.

    The certificate says which names the authority may sign for, and clients hold it to that: `localhost`, and that of
    the head's host. It may sign for every address.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / AUTHORITY_KEY).exists() and may_certify(folder, "localhost"):
        return
    names = [x509.DNSName(name) for name in dict.fromkeys(("localhost", host))]
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name(f"Headrace fleet {secrets.token_hex(8)}")
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.NameConstraints(names, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / AUTHORITY_KEY, key)
    (folder / AUTHORITY).write_bytes(_pem(certificate))


def may_certify(folder: Path, name: str) -> bool:
    """Whether clients take what the authority in `folder` signs for a name."""
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    return _within(_general_name(name), _permitted_names(authority))


def request_certificate(folder: Path, names: Sequence[str]) -> bytes:
    """A new key for this host, `host-key.pem`, and the request (PEM) for a certificate with these names."""
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


def certify(folder: Path, request: bytes) -> bytes:
    """The certificate (PEM) that a request asks for, by the authority in `folder`. Raises BadCertificate."""
    try:
        asked = x509.load_pem_x509_csr(request)
        names = asked.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise BadCertificate("it is no request for a certificate with names of a host") from error
    if not asked.is_signature_valid:
        raise BadCertificate("the request is not signed by the key that it names")
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    signed_for = _permitted_names(authority)
    for name in names.value:
        if not _within(name, signed_for):
            raise BadCertificate(
                f"this fleet's authority signs for addresses, {' and '.join(signed_for)}, not for {name.value}"
            )
    key = _private_key(folder / AUTHORITY_KEY)
    subject = _common_name(str(next(iter(names.value)).value))
    certificate = (
        _builder(subject, authority.subject, asked.public_key(), HOST_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(names.value, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate)


def check_files(folder: Path, name: str) -> None:
    """Refuses a host's files that others would refuse at `name`. Raises BadCertificate."""
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
    if name not in names:
        raise BadCertificate(f"{folder / CERTIFICATE} is for {', '.join(names) or 'no name'}, not for {name}")
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


def _builder(subject: x509.Name, issuer: x509.Name, key: object, days: int) -> x509.CertificateBuilder:
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
        .subject_name(_common_name(names[0]))
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
    return isinstance(name, x509.IPAddress)


def _general_name(text: str) -> x509.GeneralName:
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
