"""Encrypted gRPC, and a fleet's own authority."""

import asyncio
import datetime

import grpc
import pytest
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.process.probe import main as probe
from headrace_servicekit.rpc import certificates, tls
from headrace_servicekit.rpc.certificates import (
    BadCertificate,
    certify,
    check_files,
    fingerprint,
    make_authority,
    make_certificate,
    request_certificate,
)
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError

from conftest import ScriptedReward


def files(folder, *names, days=100, role="reward"):
    """An authority and a certificate in one directory."""
    make_authority(folder, "head")
    make_certificate(folder, folder, role, "here", names, days)
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


def fleet(folder):
    return certificates.fleet_of((folder / tls.AUTHORITY).read_bytes())


def _close():
    return reward_pb2.CloseRunRequest()


async def test_a_server_is_reached_by_those_who_trust_its_authority_alone(
    servers, reward_stub, encrypted, tmp_path
):
    ours, other = files(tmp_path / "a", role="coordinator"), files(tmp_path / "b", role="coordinator")
    serving = tmp_path / "c"
    make_certificate(ours, serving, "reward", "here")
    encrypted(serving)
    _, address = await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")
    assert await asyncio.to_thread(probe, [address]) == 0
    encrypted(ours)
    assert (await refusal(reward_stub(address, "t"))).code() is grpc.StatusCode.INTERNAL  # No servicer.
    encrypted(serving)
    assert await asyncio.to_thread(probe, [address]) == 0
    encrypted(other)
    foreign = await refusal(reward_stub(address, "t"))
    assert foreign.code() is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in foreign.details()
    encrypted(None)
    assert (await refusal(reward_stub(address, "t"))).code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(probe, [address]) == 1


async def test_an_instance_does_not_pass_for_the_coordinator(servers, encrypted, tmp_path):
    """Whoever calls the coordinator asks for its name; an instance's certificate has another."""
    encrypted(files(tmp_path))
    _, address = await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")
    async with dial(address, token="t", name=tls.COORDINATOR_NAME) as channel:
        found = await refusal(reward_pb2_grpc.RewardServiceStub(channel))
    assert found.code() is grpc.StatusCode.UNAVAILABLE and "Hostname Verification" in found.details()


async def test_servers_and_channels_use_newest_files_and_calls_under_way_stay(servers, encrypted, tmp_path):
    """Even the authority is another one: what a channel began with is refused by the time of its next call."""
    server, client = tmp_path / "server", tmp_path / "client"

    def rotate(name):
        make_authority(tmp_path / name, "head", "our-fleet")
        make_certificate(tmp_path / name, server, "reward", "here")

    rotate("a")
    make_certificate(tmp_path / "a", client, "coordinator", "here")
    encrypted(server)
    _, address = await servers(ScriptedReward(), token="t")
    encrypted(client)
    async with dial(address, token="t") as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        stream = stub.Score()
        await stream.write(reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=1)]))
        assert (await stream.read()).results[0].attempt == 1
        rotate("b")
        async with dial(address, token="t") as late:
            assert (
                await refusal(reward_pb2_grpc.RewardServiceStub(late))
            ).code() is grpc.StatusCode.UNAVAILABLE
        make_certificate(tmp_path / "b", client, "coordinator", "here")
        await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=10)
        assert len(channel._former) == 1
        await stream.write(reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=2)]))
        assert (await stream.read()).results[0].attempt == 2


async def test_files_that_are_not_there_are_named(servers, encrypted, tmp_path):
    encrypted(tmp_path)
    with pytest.raises(ServiceError, match=r"cannot be read"):
        await servers(reward_pb2_grpc.RewardServiceServicer(), token="t")


def test_files_are_checked_before_others_refuse_them(tmp_path):
    good = files(tmp_path / "a", "10.0.0.1", "::1", "head")
    for name in ("10.0.0.1", "::1", "head", ""):
        check_files(good, "reward", name)
    with pytest.raises(BadCertificate, match=r"10\.0\.0\.1, ::1, head, not for 10\.0\.0\.2"):
        check_files(good, "reward", "10.0.0.2")
    with pytest.raises(BadCertificate, match=r"has no URI spiffe://FLEET/rollout/HOST"):
        check_files(good, "rollout")
    with pytest.raises(BadCertificate, match=r"not for coordinator\.headrace"):
        check_files(good, "coordinator")
    old = files(tmp_path / "b", "head", days=-0.5)
    with pytest.raises(BadCertificate, match=f"expired on {datetime.date.today().year}"):
        check_files(old, "reward", "head")
    (old / tls.AUTHORITY).write_bytes((good / tls.AUTHORITY).read_bytes())
    other = files(tmp_path / "c", "head", days=9)
    (old / tls.CERTIFICATE).write_bytes((other / tls.CERTIFICATE).read_bytes())
    with pytest.raises(BadCertificate, match="does not come from the authority"):
        check_files(old, "reward", "head")
    request_certificate(good, ["head"])
    with pytest.raises(BadCertificate, match="is not the key of"):
        check_files(good, "reward", "head")
    (good / tls.KEY).write_text("nothing")
    with pytest.raises(BadCertificate, match="cannot be read as a key"):
        check_files(good, "reward", "head")
    (good / tls.CERTIFICATE).unlink()
    with pytest.raises(BadCertificate, match=r"host\.pem cannot be read"):
        check_files(good, "reward", "head")


def test_a_request_names_whom_it_is_for_and_of_which_fleet(tmp_path):
    folder = files(tmp_path)
    for names, why in (
        (["10.0.0.1"], "must name its holder as spiffe://headrace-"),
        (["spiffe://other/rollout/b"], "must name its holder"),
        ([f"spiffe://{fleet(folder)}/nobody/b"], "must name its holder"),
        (
            [f"spiffe://{fleet(folder)}/rollout/b", f"spiffe://{fleet(folder)}/trainer/b"],
            "must name its holder",
        ),
        ([f"spiffe://{fleet(folder)}/rollout/b", "coordinator.headrace"], "is the coordinator's name"),
    ):
        with pytest.raises(BadCertificate, match=why):
            certify(folder, request_certificate(tmp_path / "x", names))


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
