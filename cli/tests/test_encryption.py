"""An encrypted fleet: what keeps a client or a host out is named."""

from __future__ import annotations

import asyncio
import http.server
import json
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
from headrace_cli.launcher.plan import Head
from headrace_cli.launcher.state import read_state
from headrace_servicekit.rpc import certificates
from headrace_servicekit.rpc.addresses import free_port


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """Keys of authorities go there, and not to the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def made(folder):
    return make_files(DataDir.at(folder), "127.0.0.1")


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
    port = https(tmp_path / "a/tls")
    url = f"https://127.0.0.1:{port}"
    assert "HEADRACE_CA_FILE" in refusal(url) and "another authority" in refusal(
        url, tmp_path / "c/tls/ca.pem"
    )
    assert "has expired" in refusal(
        f"https://127.0.0.1:{https(tmp_path / 'b/tls')}", tmp_path / "b/tls/ca.pem"
    )
    assert "for another name" in refusal(f"https://127.0.0.2:{port}", tmp_path / "a/tls/ca.pem")
    assert "write https:" in refusal(f"http://127.0.0.1:{port}")
    assert "cannot be read as certificates" in refusal(url, tmp_path / "a/tls/host-key.pem")


def test_a_plain_coordinator_is_told_from_an_encrypted_one(coordinator, tmp_path):
    made(tmp_path)
    assert "write http:" in refusal(coordinator.url.replace("http:", "https:"), tmp_path / "tls/ca.pem")


def test_a_fingerprint_decides_what_is_trusted(https, tmp_path):
    pin = made(tmp_path / "head")
    url = f"https://127.0.0.1:{https(tmp_path / 'head/tls')}"
    spelled = ":".join(pin[place : place + 2] for place in range(0, 64, 2)).upper()
    assert (
        trust(tmp_path / "x", url, None, spelled).read_bytes() == (tmp_path / "head/tls/ca.pem").read_bytes()
    )
    with pytest.raises(CommandError, match=f"shows {pin}, not 00") as other:
        trust(tmp_path / "y", url, None, "00" * 32)
    assert other.value.exit_code == 2 and not (tmp_path / "y/ca.pem").exists()
    with pytest.raises(CommandError, match="no certificate in PEM"):
        trust(tmp_path / "y", url, tmp_path / "head/tls/host-key.pem", "")


def test_files_of_ones_own_are_checked(tmp_path):
    made(tmp_path / "own")
    take_files(tmp_path / "own/tls", tmp_path / "data", "127.0.0.1")
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == [
        "ca.pem",
        "host-key.pem",
        "host.pem",
    ]
    with pytest.raises(CommandError, match=r"not for 10\.0\.0\.1") as refused:
        take_files(tmp_path / "own/tls", tmp_path / "data", "10.0.0.1")
    assert refused.value.exit_code == 2


def shortly_valid(place, keys):
    """The host's certificate as it is when more than half of its life is over: of the same key and names."""
    with pytest.MonkeyPatch.context() as patch:
        own = x509.load_pem_x509_certificate((place.tls / "host.pem").read_bytes())
        key = certificates._private_key(place.tls / "host-key.pem")
        patch.setattr(certificates, "HOST_DAYS", 0.5)
        request = certificates._request(key, certificates.names_of(own))
        certificates.put_certificate(place.tls, certificates.certify(keys, request))
    return own


def life_of(place):
    own = x509.load_pem_x509_certificate((place.tls / "host.pem").read_bytes())
    return own.not_valid_after_utc - own.not_valid_before_utc


def renewed_by_its_head(tmp_path, monkeypatch):
    """The launcher's hourly task on a host that has joined, an hour being an instant, with TLS as there."""
    place, keys = DataDir.at(tmp_path / "b"), DataDir.at(tmp_path / "head").authority_keys
    lead = read_state(DataDir.at(tmp_path / "head"))
    head = Head(lead.url, lead.grpc_address, str(tmp_path / "head/token"))
    monkeypatch.setenv("HEADRACE_TLS_DIR", str(place.tls))
    monkeypatch.setattr(encryption, "RENEWAL_S", 0.01)

    async def until_renewed(by):
        task = asyncio.create_task(encryption.keep_certified(place, by))
        async with asyncio.timeout(30):
            while life_of(place).days < 7:  # noqa: ASYNC110 - a file tells nobody of its change
                await asyncio.sleep(0.01)
        task.cancel()

    own = shortly_valid(place, keys)
    key = (place.tls / "host-key.pem").read_bytes()
    asyncio.run(until_renewed(head))
    now = x509.load_pem_x509_certificate((place.tls / "host.pem").read_bytes())
    assert certificates.names_of(now) == certificates.names_of(own)
    assert (place.tls / "host-key.pem").read_bytes() == key
    certificates.check_files(place.tls, "127.0.0.1")


def test_the_hourly_task_goes_on_while_its_head_is_away(tmp_path, monkeypatch):
    """Whatever goes wrong in one hour is tried again in the next."""
    place = DataDir.at(tmp_path)
    make_files(place, "127.0.0.1")
    shortly_valid(place, place.authority_keys)
    before, slept, seen, asked = (place.tls / "host.pem").read_bytes(), [], [], []

    async def sleep(seconds):
        slept.append(seconds)
        seen.append((place.tls / "host.pem").read_bytes() == before)
        if len(slept) == 4:
            raise asyncio.CancelledError

    async def certify(head, request):
        asked.append(request)
        if len(asked) == 1:
            raise OSError("no token file")
        if len(asked) == 2:
            return await real(head, request)  # nobody is there
        return certificates.certify(place.authority_keys, request)

    real = encryption._certify
    token = tmp_path / "t"
    token.write_text("t")
    monkeypatch.setattr(encryption, "_certify", certify)
    monkeypatch.setattr(encryption, "CERTIFY_S", 0.2)
    monkeypatch.setattr(encryption, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    head = Head("https://127.0.0.1:1", f"127.0.0.1:{free_port()}", str(token))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(encryption.keep_certified(place, head))
    assert slept == [3600.0] * 4
    assert seen == [True, True, True, False] and life_of(place).days >= 7


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
        renewed_by_its_head(tmp_path, monkeypatch)
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
        make_files(place, "127.0.0.1")
    assert not [*theirs.iterdir()]
