"""Encrypted gRPC, and a fleet's own authority."""

import asyncio
import datetime

import grpc
import pytest
from headrace.reward.v1 import reward_pb2_grpc
from headrace_servicekit.process.probe import main as probe
from headrace_servicekit.rpc import certificates, tls
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    check_files,
    fingerprint,
    make_authority,
    request_certificate,
)
from headrace_servicekit.rpc.errors import ServiceError


def files(folder, *names, days=100, monkeypatch=None):
    """An authority and a host's certificate in one directory."""
    if monkeypatch:
        monkeypatch.setattr(certificates, "HOST_DAYS", days)
    make_authority(folder, "head")
    (folder / tls.CERTIFICATE).write_bytes(certify(folder, request_certificate(folder, names)))
    return folder


@pytest.fixture
def encrypted(monkeypatch):
    """`encrypted(folder)` makes this process speak TLS with the files in a folder, and None plainly."""

    def use(folder):
        monkeypatch.setenv(tls.VARIABLE, str(folder)) if folder else monkeypatch.delenv(tls.VARIABLE)

    return use


async def refusal(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.CloseRun(_close(), timeout=5, wait_for_ready=False)
    return caught.value


def _close():
    from headrace.reward.v1 import reward_pb2

    return reward_pb2.CloseRunRequest()


async def test_a_server_is_reached_by_those_who_trust_its_authority_alone(
    servers, reward_stub, encrypted, tmp_path
):
    ours, other = files(tmp_path / "a", "127.0.0.1"), files(tmp_path / "b", "127.0.0.1")
    encrypted(ours)
    _, address = await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")
    assert (await refusal(reward_stub(address, "t"))).code() is grpc.StatusCode.INTERNAL  # No servicer.
    assert await asyncio.to_thread(probe, [address]) == 0
    encrypted(other)
    foreign = await refusal(reward_stub(address, "t"))
    assert foreign.code() is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in foreign.details()
    encrypted(None)
    assert (await refusal(reward_stub(address, "t"))).code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(probe, [address]) == 1


async def test_a_name_that_is_not_in_the_certificate_is_refused(servers, reward_stub, encrypted, tmp_path):
    encrypted(files(tmp_path, "localhost"))
    _, address = await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")
    assert (await refusal(reward_stub(address, "t"))).code() is grpc.StatusCode.UNAVAILABLE


async def test_one_certificate_serves_processes_at_any_address_by_the_name_that_it_is_for(
    servers, reward_stub, encrypted, tmp_path, monkeypatch
):
    encrypted(files(tmp_path, "head"))
    _, address = await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")
    reached = {"head": grpc.StatusCode.INTERNAL, "other": grpc.StatusCode.UNAVAILABLE}  # No servicer; nobody.
    for name, said in reached.items():
        monkeypatch.setenv(tls.NAME_VARIABLE, name)
        assert (await refusal(reward_stub(address, "t"))).code() is said, name
        assert await asyncio.to_thread(probe, [address]) == int(name == "other")


async def test_files_that_are_not_there_are_named(servers, encrypted, tmp_path):
    encrypted(tmp_path)
    with pytest.raises(ServiceError, match=r"host-key\.pem cannot be read.*headrace up --tls"):
        await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")


def test_files_are_checked_before_others_refuse_them(tmp_path, monkeypatch):
    good = files(tmp_path / "a", "10.0.0.1", "::1", "head")
    for name in ("10.0.0.1", "::1", "head"):
        check_files(good, name)
    with pytest.raises(BadCertificate, match=r"is for 10\.0\.0\.1, ::1, head, not for 10\.0\.0\.2"):
        check_files(good, "10.0.0.2")
    old = files(tmp_path / "b", "head", days=-0.5, monkeypatch=monkeypatch)
    with pytest.raises(BadCertificate, match=f"expired on {datetime.date.today().year}"):
        check_files(old, "head")
    (old / tls.AUTHORITY).write_bytes((good / tls.AUTHORITY).read_bytes())
    (old / tls.CERTIFICATE).write_bytes(
        (files(tmp_path / "c", "head", days=9, monkeypatch=monkeypatch) / tls.CERTIFICATE).read_bytes()
    )
    with pytest.raises(BadCertificate, match="does not come from the authority"):
        check_files(old, "head")
    request_certificate(good, ["head"])
    with pytest.raises(BadCertificate, match="is not the key of"):
        check_files(good, "head")
    (good / tls.KEY).write_text("nothing")
    with pytest.raises(BadCertificate, match="cannot be read as a key"):
        check_files(good, "head")
    (good / tls.CERTIFICATE).unlink()
    with pytest.raises(BadCertificate, match=r"host\.pem cannot be read"):
        check_files(good, "head")


def test_an_authority_stays_and_keys_are_readable_by_their_owner_alone(tmp_path):
    folder = files(tmp_path, "head")
    before = fingerprint((folder / tls.AUTHORITY).read_bytes())
    files(tmp_path, "head")
    assert fingerprint((folder / tls.AUTHORITY).read_bytes()) == before and len(before) == 64
    assert {(folder / name).stat().st_mode & 0o777 for name in (tls.KEY, certificates.AUTHORITY_KEY)} == {
        0o600
    }
    with pytest.raises(BadCertificate, match="no request"):
        certify(folder, b"nonsense")
