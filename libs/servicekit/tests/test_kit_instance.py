"""An instance and its session: registration, leases over a real stream, a restarted coordinator, its end."""

import asyncio
import os
import signal
import subprocess
import sys

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.instance import Instance, InstanceConfig, parse_instance_config
from headrace_servicekit.lease.devices import boot_id
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.rpc.errors import ServiceError

REWARD = "headrace.reward.v1.RewardService"


def header(lease, coordinator=1):
    return common_pb2.CommandHeader(coordinator_epoch=coordinator, lease_epoch=lease)


def opening(open_id):
    return common_pb2.CommandHeader(run="runs/r", coordinator_epoch=1, open_id=open_id)


async def nothing():
    return None


@pytest.fixture
async def fleet(servers, new_fleet):
    """A scripted coordinator and its address; `restart()` is another one on the same port."""
    made = new_fleet()
    made.server, made.address = await servers(made)

    async def restart(**changes):
        await made.server.drain(0)
        later = new_fleet(**{"epoch": made.epoch + 1, **changes})
        later.server, later.address = await servers(later, listen=made.address)
        return later

    made.restart = restart
    return made


@pytest.fixture
async def instances(tmp_path, scripted_reward):
    """`await instances(coordinator, **config)` starts an instance whose lease callbacks record."""
    started = []

    async def start(coordinator="", *, prepare=lambda instance: None, **config):
        fields = {
            "kind": "rollout",
            "host": "h",
            "devices": ("cpu:0",),
            "shm_dir": tmp_path / "shm",
            **config,
        }
        instance = Instance(InstanceConfig(coordinator=coordinator, **fields))
        instance.calls = []

        async def on_grant(lease):
            instance.calls.append(("grant", lease.epoch))

        async def on_revoke(epoch, notice_s, keep):
            instance.calls.append(("revoke", epoch, notice_s))
            return Memory(4096, 77)

        instance.on_grant, instance.on_revoke = on_grant, on_revoke
        instance.add_service(reward_pb2_grpc.add_RewardServiceServicer_to_server, scripted_reward, REWARD)
        prepare(instance)
        await instance.start()
        started.append(instance)
        return instance

    yield start
    for instance in started:
        await instance.stop(0.5)


async def test_register_says_who_and_where_and_the_address_answers(fleet, instances, until, reward_stub):
    instance = await instances(fleet.address, name="rollout-3", incarnation="abc")
    instance.capabilities["engines"] = ["transformers"]
    request = await until(lambda: fleet.registered and fleet.registered[0], "the registration")
    assert (request.instance, request.incarnation, request.host) == ("rollout-3", "abc", "h")
    assert request.kind == fleet_pb2.SERVICE_KIND_ROLLOUT and list(request.devices) == [f"{boot_id()}/cpu:0"]
    assert request.address == instance.address
    assert await reward_stub(request.address).OpenRun(reward_pb2.OpenRunRequest())


async def test_heartbeats_carry_figures_once_and_rise_by_one(fleet, instances, until):
    instance = await instances(fleet.address)
    instance.report(common_pb2.StageMetrics(stage="generate", tokens=7))

    def beaten():  # the processor's ticks are longer than some beats are apart
        beats = fleet.said("heartbeat")
        return beats[3:] and any(beat.busy_cores > 0 for beat in beats[1:]) and beats

    beats = await until(beaten, "heartbeats of a process that works")
    assert [beat.sequence for beat in beats[:4]] == [1, 2, 3, 4]
    assert [m.tokens for beat in beats for m in beat.metrics] == [7]
    assert beats[0].resident_memory_bytes > 1 << 20
    assert not beats[0].gpus


async def test_a_lease_is_granted_held_renewed_revoked_and_released(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    (told,) = await until(lambda: fleet.said("lease_held"), "LeaseHeld")
    assert (told.epoch, told.refusal) == (7, "")
    instance.fence.check(header(7), lease=True)
    await until(lambda: 7 in fleet.said("heartbeat")[-1].lease_epochs, "a renewal")
    fleet.revoke(7, notice_s=2.0)
    (released,) = await until(lambda: fleet.said("lease_released"), "LeaseReleased")
    assert (released.epoch, released.free_memory_bytes, released.used_memory_bytes) == (7, 4096, 77)
    assert instance.calls == [("grant", 7), ("revoke", 7, 2.0)]
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        instance.fence.check(header(7), lease=True)


async def test_a_grant_that_cannot_be_taken_is_refused_with_its_reason(fleet, instances, until):
    async def no(lease):
        raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_MEMORY", "the model does not fit")

    instance = await instances(fleet.address, prepare=lambda instance: setattr(instance, "on_grant", no))
    fleet.grant(7)
    (told,) = await until(lambda: fleet.said("lease_held"), "LeaseHeld")
    assert told.refusal == "the model does not fit"
    assert not instance.fence.holds(7)


async def test_without_renewal_the_fence_closes_before_the_ttl_and_opens_again(fleet, instances, until):
    quiesced = asyncio.Event()

    async def on_quiesce(epoch):
        quiesced.set()

    fleet.renew = False
    instance = await instances(
        fleet.address, prepare=lambda instance: setattr(instance, "on_quiesce", on_quiesce)
    )
    await until(lambda: fleet.said("heartbeat"), "the session")
    fleet.grant(7, ttl_s=1.2)
    await until(lambda: instance.fence.holds(7), "the lease")
    await asyncio.wait_for(quiesced.wait(), 20)
    with pytest.raises(ServiceError, match="LEASE_QUIESCED"):
        instance.fence.check(header(7), lease=True)
    assert ("revoke", 7, 0.0) not in instance.calls
    fleet.renew = True
    await until(lambda: instance.fence.holds(7), "the lease again")


async def test_a_lease_of_a_stale_epoch_is_released(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    fleet.stale.add(7)
    await until(lambda: fleet.said("lease_released"), "LeaseReleased")
    assert instance.calls[-1] == ("revoke", 7, 0.0) and not instance.fence.holds(7)


async def test_a_restarted_coordinator_hears_of_leases_runs_and_its_predecessors_epoch(
    fleet, instances, until
):
    instance = await instances(fleet.address)
    await instance.open_run(opening(3), None, nothing, nothing)
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    later = await fleet.restart()
    request = await until(lambda: later.registered and later.registered[0], "a registration")
    assert request.incarnation == instance.config.incarnation
    assert [held.epoch for held in request.held_leases] == [7]
    assert request.held_leases[0].run == "runs/r" and list(request.open_runs) == ["runs/r"]
    report = common_pb2.OpenRunReport(run="runs/r", open_id=3, phase=common_pb2.OPEN_PHASE_OPEN)
    assert list(request.open_run_reports) == [report]
    assert request.coordinator_epoch == 1
    await until(lambda: any(7 in beat.lease_epochs for beat in later.said("heartbeat")), "a renewal")
    assert instance.calls == [("grant", 7)] and instance.fence.holds(7)
    with pytest.raises(ServiceError, match="EPOCH_STALE"):
        instance.fence.check(header(7, coordinator=1), lease=True)


async def test_a_restarted_coordinator_may_call_a_lease_stale(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    later = await fleet.restart(stale={7})
    (released,) = await until(lambda: later.said("lease_released"), "LeaseReleased")
    assert released.epoch == 7 and instance.calls[-1] == ("revoke", 7, 0.0)


async def test_a_coordinator_of_the_past_is_not_obeyed(fleet, instances, until):
    fleet.epoch = 5
    instance = await instances(fleet.address)
    await until(lambda: fleet.said("heartbeat"), "the session")
    past = await fleet.restart(epoch=3)
    await until(lambda: len(past.registered) >= 2, "two registrations")
    assert not past.events and instance.fence.coordinator_epoch == 5


async def test_a_release_that_was_not_acknowledged_is_told_again(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    await until(lambda: fleet.said("lease_held"), "LeaseHeld")
    fleet.acknowledge = False
    fleet.revoke(7)
    await until(lambda: fleet.said("lease_released"), "LeaseReleased")
    later = await fleet.restart()
    (released,) = await until(lambda: later.said("lease_released"), "LeaseReleased again")
    assert released.free_memory_bytes == 4096 and instance.calls.count(("revoke", 7, 1.0)) == 1


async def test_a_silent_coordinator_is_dialled_again(fleet, instances, until):
    fleet.acknowledge = False
    await instances(fleet.address)
    await until(lambda: len(fleet.registered) >= 2, "a second registration")


async def test_stopping_releases_leases_and_tells_it(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    await instance.stop(2.0)
    assert instance.calls[-1] == ("revoke", 7, 2.0)
    assert [released.epoch for released in fleet.said("lease_released")] == [7]


async def test_stopping_waits_until_the_release_has_arrived(fleet, instances, until):
    instance = await instances(fleet.address)
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    fleet.reading.clear()
    stopping = asyncio.ensure_future(instance.stop(0.5))
    await asyncio.sleep(0.5)
    assert not fleet.said("lease_released")
    fleet.reading.set()
    await stopping
    assert fleet.said("lease_released")


async def test_a_drain_runs_the_callback_within_its_grace(fleet, instances, until):
    graces = []

    async def on_drain(grace_s):
        graces.append(grace_s)
        await asyncio.sleep(60)

    instance = await instances(
        fleet.address, prepare=lambda instance: setattr(instance, "on_drain", on_drain)
    )
    await until(lambda: fleet.said("heartbeat"), "the session")
    fleet.drain(0.3)
    await asyncio.wait_for(instance.drained.wait(), 20)
    assert graces == [pytest.approx(0.3)]


async def test_a_lease_that_cannot_be_freed_is_not_called_released(fleet, instances, until):
    async def broken(epoch, notice_s, keep):
        raise ValueError("device lost")

    instance = await instances(fleet.address, prepare=lambda instance: setattr(instance, "on_revoke", broken))
    fleet.grant(7)
    await until(lambda: instance.fence.holds(7), "the lease")
    fleet.revoke(7)
    await asyncio.wait_for(instance.drained.wait(), 20)
    assert "device lost" in instance.failure and not instance.fence.holds(7)
    assert not fleet.said("lease_released")


async def test_several_instances_live_in_one_process(fleet, instances, until):
    first = await instances(fleet.address, name="rollout-0")
    second = await instances(fleet.address, name="trainer-0", kind="trainer")
    await until(lambda: len(fleet.registered) == 2, "both registrations")
    assert first.address != second.address
    first.fence.grant(1)
    assert not second.fence.holds(1)


async def test_stand_alone_there_is_no_session_and_a_grant_by_hand(instances):
    instance = await instances()
    instance.fence.grant(3)
    instance.fence.check(header(3), lease=True)
    instance.fence.release(3)


async def test_the_weight_store_knows_the_address_and_goes_with_the_instance(instances):
    instance = await instances()
    store = instance.weights
    assert store.address == instance.address and store.directory.is_dir()
    await instance.stop(0)
    assert not store.directory.exists()


SERVICE = """
import asyncio, sys
from headrace_servicekit.instance import Instance, parse_instance_config
async def main():
    instance = Instance(parse_instance_config("reward", sys.argv[1:]))
    async def on_drain(grace): print("drained", flush=True)
    instance.on_drain = on_drain
    await instance.run()
asyncio.run(main())
"""


async def test_sigterm_ends_a_process_in_order(fleet, until, tmp_path, processes):
    arguments = ["--coordinator", fleet.address, "--name", "reward-9", "--shm-dir", str(tmp_path)]
    process = processes(
        [sys.executable, "-c", SERVICE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    await until(lambda: fleet.registered, "the registration", 30)
    assert fleet.registered[0].instance == "reward-9"
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None, "the end")
    assert process.returncode == 0 and process.stdout.read() == b"drained\n"


def test_config_comes_from_flags_then_environment_then_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_NAME", "from-environment")
    monkeypatch.setenv("HEADRACE_HOST", "box")
    monkeypatch.setenv("HEADRACE_DEVICES", "cpu:0, cpu:1")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    config = parse_instance_config("rollout", ["--host", "h2", "--token-file", str(tmp_path / "token")])
    assert (config.name, config.host) == ("from-environment", "h2")
    assert config.devices == (f"{boot_id()}/cpu:0", f"{boot_id()}/cpu:1") and config.read_token() == "secret"
    assert config.incarnation and config.incarnation != parse_instance_config("rollout", []).incarnation
    monkeypatch.delenv("HEADRACE_NAME")
    assert parse_instance_config("trainer", []).name == "trainer-0"


def test_auto_devices_are_this_hosts(monkeypatch):
    config = parse_instance_config("trainer", ["--devices", "auto", "--host", "h"])
    cores = [f"{boot_id()}/cpu:{core}" for core in sorted(os.sched_getaffinity(0))]
    assert list(config.devices) == cores or config.devices[0].startswith("GPU-")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--log-level", "loud"], "--log-level (HEADRACE_LOG_LEVEL)"),
        (["--devices", "tpu:1"], "tpu:1"),
        (["--metrics-port", "99999"], "--metrics-port"),
    ],
)
def test_a_wrong_setting_exits_with_2_and_names_the_flag(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_instance_config("rollout", arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "ours", "wide"),
    [
        (0o600, True, False),
        (0o400, True, False),
        (0o640, True, True),
        (0o604, True, True),
        (0o602, True, True),
        (0o440, False, False),
        (0o444, False, True),
    ],
)
def test_a_token_file_that_is_open_to_others_is_refused_with_the_fix(tmp_path, monkeypatch, mode, ours, wide):
    """A group may read what is another user's: a volume of Kubernetes gives it to the pod's."""
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid if ours else 4242)
    if ours and path.stat().st_uid == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 7)
        monkeypatch.setattr(
            type(path), "stat", lambda self: os.stat_result((0o100000 | mode, 0, 0, 1, 7, *[0] * 5))
        )
    config = InstanceConfig(kind="reward", token_file=path)
    if not wide:
        assert config.read_token() == "secret"
        return
    with pytest.raises(ServiceError, match=f"mode {mode:04o}.*: chmod 600 {path}$"):
        config.read_token()


def test_a_missing_or_empty_token_file_is_named(tmp_path):
    for path in (tmp_path / "none", tmp_path / "empty"):
        (tmp_path / "empty").write_text(" \n")
        (tmp_path / "empty").chmod(0o600)
        with pytest.raises(ServiceError, match=str(path)):
            InstanceConfig(kind="reward", token_file=path).read_token()
