"""Leases and silence over time, on clocks that the test moves."""

import asyncio

import pytest
from headrace_coordinator.api.reading.reads import instance_view
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import LeaseRequest
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.fleet.sessions import FleetSettings, InstanceUsage, Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_schema.progress import Progress

SETTINGS = FleetSettings()
TTL, BEAT = SETTINGS.lease_ttl, SETTINGS.heartbeat


class Clocks:
    """The wall clock and the monotonic one."""

    def __init__(self):
        self.wall = 1_000_000.0
        self.monotonic = 0.0


class ManagedLeases:
    """A fleet with instance `a` on device h/cpu:0, whose supervisor notes what it is told."""

    def __init__(self, clocks):
        self.clocks = clocks
        self.event_log = EventLog(MemoryStore(), lambda: clocks.wall, lambda: clocks.monotonic)
        self.killed = []

    async def open(self):
        await self.event_log.open("test", None)
        self.fleet = Fleet(self.event_log, lambda kind, address, incarnation: None, SETTINGS)
        self.supervise()
        self.event_log.state.instances["a"] = InstanceState(
            instance="trainer-0",
            incarnation="a",
            kind="trainer",
            host="h",
            address="",
            devices=["h/cpu:0"],
            capabilities={},
        )
        self.fleet.attach("a", lambda command, body: None)
        self.event_log.post(
            ev.LeaseGranted(at=0, epoch=1, incarnation="a", run="r", stage="learn", devices=["h/cpu:0"])
        )
        return self

    def supervise(self):
        def command(name, body):
            self.killed.append(body[1])

        self.fleet.supervised(Supervisor("h", command, incarnations=frozenset("a")))

    def live(self, seconds, *, beats):
        """Sweeps every second; the holder renews each second when it `beats`."""
        for _ in range(int(seconds)):
            self.clocks.monotonic += 1
            self.clocks.wall += 1
            if beats:
                self.fleet.heartbeat("a", [1], InstanceUsage())
            self.fleet.sweep_once()

    @property
    def held(self):
        return set(self.event_log.state.table.leases)


@pytest.fixture
async def lease_manager():
    return await ManagedLeases(Clocks()).open()


def shown(lease_manager):
    (state,) = lease_manager.event_log.state.instances.values()
    return instance_view(lease_manager.fleet, state)


async def test_a_holder_in_doubt_is_killed_once_its_supervisor_is_back(lease_manager):
    """The command that was sent while host h was cut off never arrived."""
    lease_manager.fleet.supervisors.clear()
    lease_manager.live(TTL, beats=True)
    lease_manager.live(TTL + 2, beats=False)
    assert (
        lease_manager.event_log.state.table.quarantined["h/cpu:0"].incarnation == "a"
        and not lease_manager.killed
    )
    lease_manager.supervise()
    lease_manager.live(1, beats=False)
    assert lease_manager.killed == ["a"]
    lease_manager.fleet.exited("a", "killed")
    assert not lease_manager.event_log.state.table.quarantined
    lease_manager.live(1, beats=False)
    assert lease_manager.killed == ["a"], "whoever is proven gone is killed no more"


@pytest.mark.parametrize("jump", [7200.0, -7200.0, 10 * 365 * 86400.0])
async def test_a_step_of_the_wall_clock_ends_no_lease_and_no_silence(lease_manager, jump):
    lease_manager.live(TTL + 5, beats=True)
    lease_manager.clocks.wall += jump
    lease_manager.live(5, beats=True)
    assert lease_manager.held == {1} and not lease_manager.killed
    view = shown(lease_manager)
    assert (view.state, view.last_heartbeat_age_s) == ("READY", 0.0)
    assert 0 < lease_manager.fleet.lease_manager.expires_in(1) <= TTL
    lease_manager.live(TTL + 2, beats=False)
    assert lease_manager.held == set() and "a" in lease_manager.killed, "real silence still ends it"


async def test_what_an_instance_uses_is_what_its_last_heartbeat_said(lease_manager):
    lease_manager.live(1, beats=True)
    usage = InstanceUsage(7, 1.25, (("GPU-aa/gpu:0", 0.5, 9),), Progress(1, 4, "steps"))
    lease_manager.fleet.heartbeat("a", [1], usage)
    assert [*lease_manager.fleet.waits.progress.values()] == [usage.progress]
    view = shown(lease_manager)
    assert (view.resident_memory_bytes, view.busy_cores) == (7, 1.25)
    assert [each.model_dump() for each in view.gpus] == [
        {"device": "GPU-aa/gpu:0", "busy": 0.5, "used_memory_bytes": 9}
    ]


async def test_nothing_expires_before_a_ttl_has_passed_since_the_coordinator_stood_still(lease_manager):
    lease_manager.live(TTL + 5, beats=True)
    lease_manager.clocks.monotonic += 10 * TTL
    lease_manager.fleet.sweep_once()
    lease_manager.live(TTL - 2, beats=False)
    assert lease_manager.held == {1} and not lease_manager.killed, "it could not be heard"
    lease_manager.fleet.heartbeat("a", [1], InstanceUsage())
    lease_manager.live(TTL - 2, beats=False)
    assert lease_manager.held == {1} and not lease_manager.killed
    lease_manager.live(4, beats=False)
    assert lease_manager.held == set() and lease_manager.killed


async def test_a_revoked_lease_keeps_its_notice_over_a_standstill(lease_manager):
    lease_manager.live(TTL + 5, beats=True)
    table = lease_manager.event_log.state.table
    lease_manager.event_log.post(ev.LeaseRevoking(at=0, epoch=1))
    lease_manager.live(1, beats=True)
    lease_manager.clocks.monotonic += 10 * TTL
    lease_manager.live(TTL - 2, beats=True)
    assert table.leases[1].state == "REVOKING"
    lease_manager.live(SETTINGS.notice + 4, beats=True)
    assert table.quarantined["h/cpu:0"].reason == "revoked past notice"


async def test_a_silent_instance_is_shown_before_it_is_killed(lease_manager):
    lease_manager.live(TTL + 5, beats=True)
    ledger, grant = SlotLedger(2, 2), Grant(trainers=["a"])
    lease_manager.event_log.state.runs["r"] = RunState("r", {}, "", ledger, Lineage(), 0.0, grant=grant)
    lease_manager.live(2 * BEAT, beats=False)
    assert shown(lease_manager).state == "READY" and lease_manager.fleet.silences("r") == []
    lease_manager.live(2, beats=False)
    view = shown(lease_manager)
    assert (view.state, view.silent_for_s) == ("SILENT", 12.0)
    assert lease_manager.fleet.silences("r") == ["trainer-0 has been silent for 12 s; it is killed at 30 s"]
    assert lease_manager.fleet.silences("other") == [] and not lease_manager.killed
    lease_manager.live(TTL - 11, beats=False)
    assert "a" in lease_manager.killed and "a" not in lease_manager.event_log.state.instances


async def test_no_value_of_the_monotonic_clock_is_written(lease_manager):
    """It begins anew with the machine: read back after a restart, it would mean another moment."""
    lease_manager.clocks.monotonic = 987_654.0
    lease_manager.live(3, beats=True)
    lease_manager.event_log.post(ev.LeaseRevoking(at=lease_manager.event_log.now(), epoch=1))
    lease_manager.live(TTL + 3, beats=False)
    written = b"".join(payload for _, payload, _ in lease_manager.event_log._pending)
    assert b"9876" not in written and b'"LeaseEnded"' in written


async def test_a_revoke_that_a_broken_session_lost_is_said_again_to_the_next(lease_manager):
    """The stream that broke while the coordinator stood still looked open to it: the revoke went nowhere."""
    lease_manager.live(TTL + 5, beats=True)
    releasing = asyncio.ensure_future(lease_manager.fleet.lease_manager.release("r", [1]))
    await asyncio.sleep(0)
    said = []
    lease_manager.live(5, beats=True)
    lease_manager.fleet.attach("a", lambda command, body: said.append((command, body)))
    assert said == [("revoke", (1, SETTINGS.notice - 5, False))]
    lease_manager.fleet.lease_manager.released("a", 1)
    await releasing
    lease_manager.fleet.attach("a", lambda command, body: said.append((command, body)))
    assert len(said) == 1


@pytest.mark.parametrize(("engine", "doubted"), [("vllm", False), ("transformers", True)])
async def test_what_a_holder_may_keep_follows_from_its_runs_engine(lease_manager, engine, doubted):
    log, gpu = lease_manager.event_log, "GPU-1/gpu:0"
    spec = {"rollout": {"engine": engine}}
    log.state.runs["r"] = RunState("r", spec, "", SlotLedger(2, 2), Lineage(), 0.0)
    log.post(ev.LeaseGranted(at=0, epoch=2, incarnation="a", run="r", stage="generate", devices=[gpu]))
    lease_manager.fleet.lease_manager.released("a", 2, used_bytes=2**30)
    assert (gpu in log.state.table.quarantined) is doubted and 2 not in log.state.table.leases


async def test_who_does_not_take_devices_is_named_with_its_reason(lease_manager):
    log, manager = lease_manager.event_log, lease_manager.fleet.lease_manager
    log.state.runs["r"] = RunState("r", {}, "", SlotLedger(2, 2), Lineage(), 0.0)
    refusal = "2 GPUs were leased and this process sees 1"

    def refuse(command, grant):
        if command == "grant":
            manager.held("a", grant.epoch, refusal)

    lease_manager.fleet.attach("a", refuse)
    writing = asyncio.ensure_future(log.run())
    acquiring = manager.acquire([LeaseRequest("a", "r", "generate", ("h/cpu:1",))], 9)
    with pytest.raises(InstanceDown, match=r"did not take h/cpu:1: refused: 2 GPUs were leased .* sees 1"):
        await acquiring
    writing.cancel()
