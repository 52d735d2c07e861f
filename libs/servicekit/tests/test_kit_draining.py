"""SIGTERM: an instance with open runs asks the coordinator to close them first, and waits no longer than its grace."""

import asyncio
import signal
import subprocess
import sys

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.process.supervisor import stop_grace_s
from headrace_servicekit.rpc.errors import ServiceError

SERVICE = """
import asyncio, sys
from headrace.common.v1 import common_pb2
from headrace_servicekit.instance import Instance, parse_instance_config
async def nothing(): pass
async def main():
    instance = Instance(parse_instance_config("reward", sys.argv[2:]))
    async def on_drain(grace): print("drained", flush=True)
    instance.on_drain = on_drain
    if sys.argv[1] == "open":
        await instance.open_run(common_pb2.CommandHeader(run="runs/r", open_id=3), None, nothing, nothing)
    await instance.run()
asyncio.run(main())
"""
LONG = ("--drain-grace-s", "600")


@pytest.fixture
async def service(fleet, until, tmp_path, processes):
    """`await service("open", *flags)` is a process with a session; "none" has no run open."""

    async def start(opened, *flags):
        arguments = [opened, "--coordinator", fleet.address, "--shm-dir", str(tmp_path), *flags]
        process = processes(
            [sys.executable, "-c", SERVICE, *arguments],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("wb"),
        )
        await until(lambda: fleet.said("heartbeat"), "the session", 60)
        fleet.grant(7)  # Obeyed after the heartbeat's ack, so the session is known to stand.
        await until(lambda: fleet.said("lease_held"), "the lease")
        return process

    return start


@pytest.fixture
async def fleet(servers, new_fleet):
    made = new_fleet()
    made.server, made.address = await servers(made)
    return made


async def ended(process, until):
    await until(lambda: process.poll() is not None, "the end", 30)
    assert process.returncode == 0 and process.stdout.read() == b"drained\n"


async def test_it_waits_for_the_coordinators_drain(fleet, service, until):
    process = await service("open", *LONG)
    process.send_signal(signal.SIGTERM)
    [draining] = await until(lambda: fleet.said("draining"), "Draining")
    assert draining.grace.ToSeconds() == 600
    beats = len(fleet.said("heartbeat"))
    await until(lambda: len(fleet.said("heartbeat")) > beats + 3, "heartbeats while it waits")
    report = fleet.said("heartbeat")[-1].open_runs[0]
    assert (report.run, report.open_id) == ("runs/r", 3) and process.poll() is None
    fleet.drain(5.0)
    await ended(process, until)


async def test_a_second_signal_ends_the_wait(fleet, service, until):
    process = await service("open", *LONG)
    process.send_signal(signal.SIGTERM)
    await until(lambda: fleet.said("draining"), "Draining")
    process.send_signal(signal.SIGTERM)
    await ended(process, until)


async def test_the_grace_ends_the_wait(fleet, service, until):
    process = await service("open", "--drain-grace-s", "0.2")
    process.send_signal(signal.SIGTERM)
    await ended(process, until)
    assert fleet.said("draining")


async def test_without_an_open_run_it_goes_at_once(fleet, service, until):
    process = await service("none", *LONG)
    process.send_signal(signal.SIGTERM)
    await ended(process, until)
    assert not fleet.said("draining")


async def nothing():
    return None


async def test_without_a_session_it_goes_at_once(tmp_path):
    config = InstanceConfig(kind="reward", coordinator="127.0.0.1:1", shm_dir=tmp_path, drain_grace_s=600)
    instance = Instance(config)
    await instance.start()
    try:
        await instance.open_run(common_pb2.CommandHeader(run="runs/r"), None, nothing, nothing)
        instance.terminate()
        await asyncio.wait_for(instance.drained.wait(), 10)
    finally:
        await instance.stop(0)


async def test_an_instance_that_was_told_to_stop_opens_no_run(fleet, tmp_path, until):
    instance = Instance(InstanceConfig(kind="reward", coordinator=fleet.address, shm_dir=tmp_path))
    await instance.start()
    try:
        await until(lambda: fleet.said("heartbeat") and instance._session.connected.is_set(), "the session")
        await instance.open_run(
            common_pb2.CommandHeader(run="runs/r", coordinator_epoch=1), 1, nothing, nothing
        )
        await until(lambda: fleet.said("heartbeat")[-1].open_runs, "the report")
        instance.terminate()
        with pytest.raises(ServiceError) as caught:
            await instance.open_run(
                common_pb2.CommandHeader(run="runs/s", coordinator_epoch=1), 1, nothing, nothing
            )
        assert caught.value.reason == "DRAINING" and not instance.drained.is_set()
    finally:
        await instance.stop(0)


@pytest.mark.parametrize(
    ("kind", "setting", "seconds"),
    [("trainer", "", 45), ("reward", "", 25), ("trainer", "7", 22), ("coordinator", "7", 15)],
)
def test_the_supervisor_kills_after_the_instances_own_grace(kind, setting, seconds, monkeypatch):
    monkeypatch.setenv("HEADRACE_DRAIN_GRACE_S", setting)
    assert stop_grace_s(kind) == seconds
