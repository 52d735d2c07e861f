"""An encrypted fleet: what keeps a client or a host out is named."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from cryptography import x509
from headrace.client import Client, HeadraceError
from headrace_cli.errors import CommandError
from headrace_cli.launcher import encryption
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.encryption import make_files, take_files, trust
from headrace_cli.launcher.plan import FleetPlan, Head
from headrace_cli.launcher.state import read_state
from headrace_servicekit.rpc import certificates, joining
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.roles import Identity


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Keys of authorities go there, and not to the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def made(folder):
    return make_files(DataDir.at(folder), "127.0.0.1", "head")


@pytest.fixture
def https():
    """`https(folder)` is the port of a server that shows the certificate in a folder."""
    servers = []

    def serve(folder):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write((folder / "ca.pem").read_bytes() if self.path == "/ca.pem" else b"{}")

            def log_message(self, *words):
                pass

        server = http.server.ThreadingHTTPServer(("", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "host.pem", folder / "host-key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def refusal(url, ca_file=None):
    with pytest.raises(HeadraceError) as caught, Client(url, "t", patience_s=0, ca_file=ca_file) as client:
        client.list()
    assert caught.value.reason == "TLS"
    return caught.value.message


def test_why_a_coordinator_is_not_trusted(https, tmp_path, monkeypatch):
    for name in "abc":
        monkeypatch.setattr(certificates, "HOST_DAYS", -0.5 if name == "b" else 100)
        made(tmp_path / name)
    port = https(tmp_path / "a/certificates/coordinator")
    url = f"https://127.0.0.1:{port}"
    assert "HEADRACE_CA_FILE" in refusal(url) and "another authority" in refusal(
        url, tmp_path / "c/certificates/coordinator/ca.pem"
    )
    assert "has expired" in refusal(
        f"https://127.0.0.1:{https(tmp_path / 'b/certificates/coordinator')}",
        tmp_path / "b/certificates/coordinator/ca.pem",
    )
    assert "for another name" in refusal(
        f"https://127.0.0.2:{port}", tmp_path / "a/certificates/coordinator/ca.pem"
    )
    assert "write https:" in refusal(f"http://127.0.0.1:{port}")
    assert "cannot be read as certificates" in refusal(
        url, tmp_path / "a/certificates/coordinator/host-key.pem"
    )


def test_a_plain_coordinator_is_told_from_an_encrypted_one(coordinator, tmp_path):
    made(tmp_path)
    assert "write http:" in refusal(
        coordinator.url.replace("http:", "https:"), tmp_path / "certificates/coordinator/ca.pem"
    )


def test_a_fingerprint_decides_what_is_trusted(https, tmp_path):
    pin = made(tmp_path / "head")
    url = f"https://127.0.0.1:{https(tmp_path / 'head/certificates/coordinator')}"
    spelled = ":".join(pin[place : place + 2] for place in range(0, 64, 2)).upper()
    assert (
        trust(tmp_path / "x", url, None, spelled).read_bytes()
        == (tmp_path / "head/certificates/coordinator/ca.pem").read_bytes()
    )
    with pytest.raises(CommandError, match=f"shows {pin}, not 00") as other:
        trust(tmp_path / "y", url, None, "00" * 32)
    assert other.value.exit_code == 2 and not (tmp_path / "y/ca.pem").exists()
    with pytest.raises(CommandError, match="no certificate in PEM"):
        trust(tmp_path / "y", url, tmp_path / "head/certificates/coordinator/host-key.pem", "")


def plan(folder, **more):
    return FleetPlan(str(folder), counts={"rollout": 1}, listen="127.0.0.1", **more)


def test_files_of_ones_own_are_checked(tmp_path):
    made(tmp_path / "own")
    own, place = tmp_path / "own/certificates", DataDir.at(tmp_path / "data")
    take_files(own, place, plan(tmp_path / "data", tls="given"))
    assert {path.name for path in place.certificates.glob("*/*")} == {"ca.pem", "host-key.pem", "host.pem"}
    assert {path.name for path in place.certificates.iterdir()} == {path.name for path in own.iterdir()}
    with pytest.raises(CommandError, match=r"not for 10\.0\.0\.1") as refused:
        take_files(own, place, FleetPlan(str(place.root), listen="10.0.0.1", tls="given"))
    assert refused.value.exit_code == 2
    shutil.copy(own / "trainer/host.pem", own / "rollout/host.pem")
    shutil.copy(own / "trainer/host-key.pem", own / "rollout/host-key.pem")
    with pytest.raises(CommandError, match="has no URI spiffe://FLEET/rollout/HOST"):
        take_files(own, place, plan(tmp_path / "data", tls="given"))


def shorten_lives(place, keys):
    """The certificates as they are when more than half of their life is over: of the same keys and names."""
    for folder in place.certificates.iterdir():
        own = x509.load_pem_x509_certificate((folder / "host.pem").read_bytes())
        key = certificates._private_key(folder / "host-key.pem")
        request = certificates._request(key, certificates.names_of(own))
        certificates.put_certificate(folder, certificates.certify(keys, request, days=0.5))


def lives(place):
    for folder in sorted(place.certificates.iterdir()):
        own = x509.load_pem_x509_certificate((folder / "host.pem").read_bytes())
        yield (own.not_valid_after_utc - own.not_valid_before_utc).days


def renewed_by_its_head(tmp_path):
    """What the launcher's hourly task does on a host that has joined."""
    place, keys = DataDir.at(tmp_path / "b"), DataDir.at(tmp_path / "head").authority_keys
    lead = read_state(DataDir.at(tmp_path / "head"))
    head = Head(lead.url, lead.grpc_address, str(tmp_path / "head/token"))
    shorten_lives(place, keys)
    key = (place.certificates / "reward/host-key.pem").read_bytes()
    encryption.renew(place, FleetPlan(str(place.root), listen="127.0.0.1", host="b", head=head, tls="made"))
    assert set(lives(place)) == {8} and (place.certificates / "reward/host-key.pem").read_bytes() == key
    certificates.check_files(place.certificates / "reward", "reward", "127.0.0.1")


def test_the_hourly_task_goes_on_while_its_head_is_away(tmp_path, monkeypatch):
    """Whatever goes wrong in one hour is tried again in the next."""
    place = DataDir.at(tmp_path)
    made(tmp_path)
    shorten_lives(place, place.authority_keys)
    token = tmp_path / "t"
    head = Head(f"http://127.0.0.1:{free_port()}", "", str(token))
    joined = FleetPlan(str(tmp_path), head=head, tls="made")
    slept, asked = [], [joined, joined, FleetPlan(str(tmp_path), tls="made")]
    real = encryption.renew

    async def sleep(seconds):
        slept.append((seconds, max(lives(place))))
        if len(slept) == 2:
            token.write_text("t")  # Until now there was none; now nobody is there; then the host is the head.
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(encryption, "renew", lambda place, _: real(place, asked.pop(0)))
    monkeypatch.setattr(encryption, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(encryption.keep_certified(place, joined))
    assert slept == [(3600.0, 1)] * 3 + [(3600.0, 8)]


def request(folder, secret="s", host="b", role="rollout", names=None):
    """What a host sends that joins the fleet of `made(folder)`."""
    keys = DataDir.at(folder).authority_keys
    known = Identity(certificates.fleet_of((keys / "ca.pem").read_bytes()), role, host)
    names = names or certificates.names_for(known, ["10.0.0.2"])
    return joining.asking(secret, host, {role: certificates.request_certificate(folder / "asks", names)})


def test_who_joins_and_the_head_prove_the_secret_to_each_other(tmp_path):
    made(tmp_path)
    place = DataDir.at(tmp_path)
    keys, own = place.authority_keys, place.certificates / "coordinator"
    asked = request(tmp_path)
    answer = joining.admit(keys, own, "s", asked)
    authority, pems = joining.answered("s", asked, answer)
    assert authority == (keys / "ca.pem").read_bytes() and set(pems) == {"rollout"}
    assert "s" not in (str(asked["proof"]), str(answer["proof"])), "the secret itself is never sent"
    for wrong in ({**answer, "authority": "x"}, {**answer, "certificates": {"rollout": "x"}}, {}, None):
        with pytest.raises(certificates.BadCertificate):
            joining.answered("s", asked, wrong)
    with pytest.raises(certificates.BadCertificate, match="another fleet's head"):
        joining.answered("s", {**asked, "nonce": "00"}, answer)


@pytest.mark.parametrize(
    ("given", "reason", "why"),
    [
        ({"secret": "other"}, "UNAUTHENTICATED", "the proof is wrong"),
        ({"host": "head"}, "INVALID", "is the head's own name"),
        ({"role": "coordinator"}, "INVALID", "is none of supervisor, rollout"),
        ({"role": "scaler"}, "INVALID", "is none of supervisor, rollout"),
        ({"host": "*"}, "INVALID", "not for a process of host"),
        ({"names": ["10.0.0.2"]}, "INVALID", "must name its holder"),
        ({"names": ["spiffe://other/rollout/b"]}, "INVALID", "must name its holder"),
        ({"names": ["spiffe://FLEET/rollout/c"]}, "INVALID", "not for a process of host 'b'"),
        ({"names": ["spiffe://FLEET/trainer/b"]}, "INVALID", "must name its holder"),
        ({"names": ["spiffe://FLEET/rollout/b", "127.0.0.5"]}, "INVALID", "127.0.0.5 is the head's own"),
        ({"names": ["spiffe://FLEET/rollout/b", "coordinator.headrace"]}, "INVALID", "coordinator's name"),
    ],
)
def test_the_head_certifies_no_more_than_a_hosts_own_processes(tmp_path, given, reason, why):
    place = DataDir.at(tmp_path)
    make_files(place, "127.0.0.5", "head")
    fleet = certificates.fleet_of((place.authority_keys / "ca.pem").read_bytes())
    if "names" in given:
        given = {**given, "names": [name.replace("FLEET", fleet) for name in given["names"]]}
    asked = request(tmp_path, **given)
    with pytest.raises(ServiceError, match=re.escape(why)) as refused:
        joining.admit(place.authority_keys, place.certificates / "coordinator", "s", asked)
    assert refused.value.reason == reason


def test_a_part_on_the_heads_own_machine_has_the_heads_address_too(tmp_path):
    """As Ray's --pack puts it there: it asks from that address."""
    place = DataDir.at(tmp_path)
    make_files(place, "127.0.0.5", "head")
    fleet = certificates.fleet_of((place.authority_keys / "ca.pem").read_bytes())
    asked = request(tmp_path, names=[f"spiffe://{fleet}/rollout/b", "127.0.0.5"])
    own = place.certificates / "coordinator"
    assert set(joining.admit(place.authority_keys, own, "s", asked, "127.0.0.5")["certificates"]) == {
        "rollout"
    }


def test_a_host_joins_an_encrypted_fleet_by_its_fingerprint(tmp_path, monkeypatch):
    def say(folder, *arguments):
        command = [sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(tmp_path / folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)

    none = ("--rollout", "0", "--trainer", "0", "--simulator", "0", "--json")
    port = str(free_port())
    try:
        up = say("head", "up", "--tls", "--port", port, "--reward", "1", *none)
        assert up.returncode == 0, up.stdout
        assert json.loads(up.stdout)["url"] == f"https://127.0.0.1:{port}"
        pin = up.stderr.partition("fingerprint: ")[2].split()[0]
        options = ("--token-file", str(tmp_path / "head/token"), "--name", "b", "--reward", "1", *none)
        plain = say("b", "join", f"127.0.0.1:{port}", *options)
        assert plain.returncode == 2 and "is encrypted" in plain.stdout and "--fingerprint" in plain.stdout
        wrong = say(
            "b",
            "join",
            f"127.0.0.1:{port}",
            *options[2:],
            "--fingerprint",
            pin,
            "--token-file",
            str(tmp_path / "head/http-token"),
        )
        assert wrong.returncode == 2 and "--token-file" in wrong.stdout, wrong.stdout
        joined = say("b", "join", f"127.0.0.1:{port}", *options, "--fingerprint", pin)
        assert joined.returncode == 0, joined.stdout

        with Client(
            f"https://127.0.0.1:{port}",
            (tmp_path / "head/http-token").read_text(),
            ca_file=tmp_path / "b/tls/ca.pem",
        ) as client:
            deadline = threading.Event()
            for _ in range(300):
                names = {item.name for item in client.instances() if item.state == "READY"}
                if names == {"reward-0", "reward-0.b"}:
                    break
                deadline.wait(0.1)
            else:
                pytest.fail(f"not both are ready: {names}")
        renewed_by_its_head(tmp_path)
        tokens = {(tmp_path / name / "services-token").read_text() for name in ("b", "head")}
        assert len(tokens) == 1 and (tmp_path / "head/token").read_text() not in tokens
    finally:
        for folder in ("b", "head"):
            say(folder, "down")


def test_the_authoritys_key_is_written_through_no_planted_link(tmp_path, monkeypatch):
    """Where others may write above its folder, as in that of temporary files for a user without a home."""
    shared, theirs = tmp_path / "shared", tmp_path / "theirs"
    shared.mkdir()
    theirs.mkdir()
    shared.chmod(0o777)
    (shared / "headrace").symlink_to(theirs)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(shared))
    place = DataDir.at(tmp_path / "data")
    with pytest.raises(CommandError, match="a symbolic link"):
        make_files(place, "127.0.0.1", "head")
    assert not [*theirs.iterdir()]
