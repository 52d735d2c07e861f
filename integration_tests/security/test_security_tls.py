"""What the authority of an encrypted fleet is good for: its own hosts, for days, by a key that no service has."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import socket
import ssl
import threading

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.encryption import make_files, renew
from headrace_cli.launcher.plan import FleetPlan
from headrace_servicekit.rpc import certificates, tls
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    fleet_of,
    put_certificate,
    request_certificate,
)
from headrace_servicekit.rpc.server import GrpcServer


@pytest.fixture
def head(tmp_path, monkeypatch):
    """The data directory of a head at a private address."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    place = DataDir.at(tmp_path / "data")
    make_files(place, "10.0.0.1", "head")
    return place


def forged(place, folder, name, *, alternatives=True):
    """A certificate for any name by the fleet's own authority, as a thief of its key makes it."""
    folder.mkdir()
    keys = place.authority_keys
    authority = x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes())
    signing = serialization.load_pem_private_key((keys / "ca-key.pem").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if alternatives:
        given = x509.SubjectAlternativeName([x509.DNSName(name)])
        builder = builder.add_extension(given, critical=False)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "host.pem").write_bytes(builder.sign(signing, hashes.SHA256()).public_bytes(pem))
    (folder / "host-key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return folder


def refusal(folder, authority, name):
    """Why a client that trusts the authority refuses what a server shows under a name; empty where it does not."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "host.pem", folder / "host-key.pem")
    ours, theirs = socket.socketpair()

    def serve():
        try:
            with serving.wrap_socket(theirs, server_side=True) as answered:
                answered.recv(1)
        except OSError:
            theirs.close()

    server = threading.Thread(target=serve)
    server.start()
    ours.settimeout(10)
    try:
        context = ssl.create_default_context(cafile=str(authority))
        with context.wrap_socket(ours, server_hostname=name) as asked:
            asked.send(b".")
        return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        ours.close()
        server.join(10)


@pytest.mark.parametrize("name", ["example.com", "www.bank.example", "localhost.com", "10.example.com"])
def test_a_stolen_key_signs_for_no_name_outside_the_fleet(head, tmp_path, name):
    shown = forged(head, tmp_path / "forged", name)
    assert "permitted subtree violation" in refusal(shown, head.certificates / "coordinator" / "ca.pem", name)


def test_nor_by_a_common_name_alone(head, tmp_path):
    shown = forged(head, tmp_path / "forged", "example.com", alternatives=False)
    assert refusal(shown, head.certificates / "coordinator" / "ca.pem", "example.com")


@pytest.mark.parametrize("alternatives", [True, False])
async def test_nor_for_a_client_of_grpc(head, tmp_path, alternatives):
    """Its TLS library is another one."""
    shown = forged(head, tmp_path / "forged", "example.com", alternatives=alternatives)
    pair = ((shown / "host-key.pem").read_bytes(), (shown / "host.pem").read_bytes())
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    trust = grpc.ssl_channel_credentials((head.authority_keys / "ca.pem").read_bytes())
    options = (("grpc.ssl_target_name_override", "example.com"),)
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trust, options) as channel:
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"CERTIFICATE_VERIFY_FAILED|Hostname Verification"
            ):
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("name", ["10.0.0.1", "127.0.0.1", "::1", "localhost", socket.gethostname()])
def test_the_heads_own_names_are_taken(head, name):
    assert (
        refusal((head.certificates / "coordinator"), head.certificates / "coordinator" / "ca.pem", name) == ""
    )


def test_a_host_is_certified_for_its_address_and_no_name_outside_the_fleet(head, tmp_path):
    host, keys = tmp_path / "host", head.authority_keys
    uri = f"spiffe://{fleet_of((keys / 'ca.pem').read_bytes())}/rollout/b"
    put_certificate(host, certify(keys, request_certificate(host, [uri, "10.250.3.4", "localhost"])))
    assert refusal(host, head.certificates / "coordinator" / "ca.pem", "10.250.3.4") == ""
    for name in ("example.com", "10.0.0.1.example.com", "localhost.com", "*.example.com"):
        with pytest.raises(BadCertificate, match=r"signs for addresses, localhost and .*, not for "):
            certify(keys, request_certificate(host, [uri, "10.0.0.2", name]))


def test_the_authority_stays_unless_it_may_sign_for_every_name(head):
    first = (head.certificates / "coordinator" / "ca.pem").read_bytes()
    make_files(head, "192.168.1.1", "head")
    assert (head.certificates / "coordinator" / "ca.pem").read_bytes() == first
    shutil.copyfile(
        head.certificates / "coordinator" / "host.pem", head.authority_keys / "ca.pem"
    )  # has no name constraints
    make_files(head, "192.168.1.1", "head")
    assert (head.certificates / "coordinator" / "ca.pem").read_bytes() != first
    assert (
        refusal(
            (head.certificates / "coordinator"), head.certificates / "coordinator" / "ca.pem", "192.168.1.1"
        )
        == ""
    )


def test_its_key_is_its_owners_alone_and_not_below_the_data_directory(head):
    found = [path.name for path in head.root.rglob("*") if path.is_file()]
    assert set(found) == {"ca.pem", "host-key.pem", "host.pem"}
    assert all(
        b"PRIVATE" not in path.read_bytes()
        for path in head.root.rglob("*.pem")
        if path.name != "host-key.pem"
    )
    key = head.authority_keys / "ca-key.pem"
    assert key.stat().st_mode & 0o777 == 0o600 and key.parent.stat().st_mode & 0o777 == 0o700


def lives(folder):
    own = x509.load_pem_x509_certificate((folder / "host.pem").read_bytes())
    return own.not_valid_after_utc - datetime.datetime.now(datetime.UTC)


def test_a_hosts_certificate_lives_for_days_and_is_renewed_when_half_of_them_are_over(head, monkeypatch):
    assert datetime.timedelta(days=6) < lives(head.certificates / "coordinator") <= datetime.timedelta(days=7)
    fresh = (head.certificates / "coordinator" / "host.pem").read_bytes()
    renew(head, FleetPlan(str(head.root), listen="10.0.0.1"))
    assert (head.certificates / "coordinator" / "host.pem").read_bytes() == fresh
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "HOST_DAYS", 0.5)
        make_files(head, "10.0.0.1", "head")
    renew(head, FleetPlan(str(head.root), listen="10.0.0.1"))
    assert lives(head.certificates / "coordinator") > datetime.timedelta(days=6)
    assert (
        refusal((head.certificates / "coordinator"), head.certificates / "coordinator" / "ca.pem", "10.0.0.1")
        == ""
    )


async def test_running_servers_show_the_renewed_certificate(head, monkeypatch):
    """gRPC and HTTP, without a restart."""
    monkeypatch.setenv(tls.VARIABLE, str(head.certificates / "coordinator"))
    server = GrpcServer("127.0.0.1:0", token="t", instance="one")
    port = int((await server.start()).rpartition(":")[2])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        head.certificates / "coordinator" / "host.pem", head.certificates / "coordinator" / "host-key.pem"
    )
    tls.show_newest(context, (head.certificates / "coordinator"))
    http = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    ports = (port, http.sockets[0].getsockname()[1])
    try:
        for _ in range(2):
            newest = (head.certificates / "coordinator" / "host.pem").read_text()
            for each in ports:
                shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", each), timeout=10)
                assert shown == newest
            make_files(head, "10.0.0.1", "head")
    finally:
        http.close()
        await server.drain(0)
