"""Leases and silence over time, on clocks that the test moves."""

import asyncio

import pytest
from headrace_coordinator.api.presenters import instance_views
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.slots import SlotLedger
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.domain.versions import Lineage
from headrace_coordinator.fleet.fleet import Fleet, FleetSettings, Supervisor
from headrace_coordinator.store.event_log import Kernel
from headrace_coordinator.store.memory_store import MemoryStore

SETTINGS = FleetSettings()
TTL, BEAT = SETTINGS.lease_ttl, SETTINGS.heartbeat


class Clocks:
    """The wall clock and the monotonic one."""

    def __init__(self):
        self.wall = 1_000_000.0
        self.monotonic = 0.0


class Desk:
    """A fleet with instance `a` on device h/cpu:0, whose supervisor notes what it is told."""

    def __init__(self, clocks):
        self.clocks = clocks
        self.kernel = Kernel(MemoryStore(), lambda: clocks.wall, lambda: clocks.monotonic)
        self.killed = []

    async def open(self):
        await self.kernel.open("test", None)
        self.fleet = Fleet(self.kernel, lambda kind, address, incarnation: None, SETTINGS)
        self.supervise()
        self.kernel.state.instances["a"] = InstanceState(
            instance="trainer-0",
            incarnation="a",
            kind="trainer",
            host="h",
            address="",
            devices=["h/cpu:0"],
            capabilities={},
        )
        self.fleet.attach("a", lambda command, body: None)
        self.kernel.post(
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
                self.fleet.heartbeat("a", [1], 0)
            self.fleet.sweep_once()

    @property
    def held(self):
        return set(self.kernel.state.table.leases)


@pytest.fixture
async def desk():
    return await Desk(Clocks()).open()


async def test_a_holder_in_doubt_is_killed_once_its_supervisor_is_back(desk):
    """The command that was sent while host h was cut off never arrived."""
    desk.fleet.supervisors.clear()
    desk.live(TTL, beats=True)
    desk.live(TTL + 2, beats=False)
    assert desk.kernel.state.table.quarantined["h/cpu:0"].incarnation == "a" and not desk.killed
    desk.supervise()
    desk.live(1, beats=False)
    assert desk.killed == ["a"]
    desk.fleet.exited("a", "killed")
    assert not desk.kernel.state.table.quarantined
    desk.live(1, beats=False)
    assert desk.killed == ["a"], "whoever is proven gone is killed no more"


@pytest.mark.parametrize("jump", [7200.0, -7200.0, 10 * 365 * 86400.0])
async def test_a_step_of_the_wall_clock_ends_no_lease_and_no_silence(desk, jump):
    desk.live(TTL + 5, beats=True)
    desk.clocks.wall += jump
    desk.live(5, beats=True)
    assert desk.held == {1} and not desk.killed
    (view,) = instance_views(desk.fleet)
    assert (view.state, view.last_heartbeat_age_s) == ("READY", 0.0)
    assert 0 < desk.fleet.desk.expires_in(1) <= TTL
    desk.live(TTL + 2, beats=False)
    assert desk.held == set() and "a" in desk.killed, "real silence still ends it"


async def test_nothing_expires_before_a_ttl_has_passed_since_the_coordinator_stood_still(desk):
    desk.live(TTL + 5, beats=True)
    desk.clocks.monotonic += 10 * TTL
    desk.fleet.sweep_once()
    desk.live(TTL - 2, beats=False)
    assert desk.held == {1} and not desk.killed, "it could not be heard"
    desk.fleet.heartbeat("a", [1], 0)
    desk.live(TTL - 2, beats=False)
    assert desk.held == {1} and not desk.killed
    desk.live(4, beats=False)
    assert desk.held == set() and desk.killed


async def test_a_revoked_lease_keeps_its_notice_over_a_standstill(desk):
    desk.live(TTL + 5, beats=True)
    table = desk.kernel.state.table
    desk.kernel.post(ev.LeaseRevoking(at=0, epoch=1))
    desk.live(1, beats=True)
    desk.clocks.monotonic += 10 * TTL
    desk.live(TTL - 2, beats=True)
    assert table.leases[1].state == "REVOKING"
    desk.live(SETTINGS.notice + 4, beats=True)
    assert table.quarantined["h/cpu:0"].reason == "revoked past notice"


async def test_a_silent_instance_is_shown_before_it_is_killed(desk):
    desk.live(TTL + 5, beats=True)
    ledger, grant = SlotLedger(2, 2), Grant(trainers=["a"])
    desk.kernel.state.runs["r"] = RunState("r", {}, "", ledger, Lineage(), 0.0, grant=grant)
    desk.live(2 * BEAT, beats=False)
    assert instance_views(desk.fleet)[0].state == "READY" and desk.fleet.silences("r") == []
    desk.live(2, beats=False)
    (view,) = instance_views(desk.fleet)
    assert (view.state, view.silent_for_s) == ("SILENT", 12.0)
    assert desk.fleet.silences("r") == ["trainer-0 has been silent for 12 s; it is killed at 30 s"]
    assert desk.fleet.silences("other") == [] and not desk.killed
    desk.live(TTL - 11, beats=False)
    assert "a" in desk.killed and "a" not in desk.kernel.state.instances


async def test_no_value_of_the_monotonic_clock_is_written(desk):
    """It begins anew with the machine: read back after a restart, it would mean another moment."""
    desk.clocks.monotonic = 987_654.0
    desk.live(3, beats=True)
    desk.kernel.post(ev.LeaseRevoking(at=desk.kernel.now(), epoch=1))
    desk.live(TTL + 3, beats=False)
    written = b"".join(entry.payload for _, entry, _ in desk.kernel._pending)
    assert b"9876" not in written and b'"LeaseEnded"' in written


async def test_a_revoke_that_a_broken_session_lost_is_said_again_to_the_next(desk):
    """The stream that broke while the coordinator stood still looked open to it: the revoke went nowhere."""
    desk.live(TTL + 5, beats=True)
    releasing = asyncio.ensure_future(desk.fleet.desk.release("r", [1]))
    await asyncio.sleep(0)
    said = []
    desk.live(5, beats=True)
    desk.fleet.attach("a", lambda command, body: said.append((command, body)))
    assert said == [("revoke", (1, SETTINGS.notice - 5))]
    desk.fleet.desk.released("a", 1)
    await releasing
    desk.fleet.attach("a", lambda command, body: said.append((command, body)))
    assert len(said) == 1
