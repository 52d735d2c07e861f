"""How a device leaves quarantine where no supervisor has seen its holder end."""

import asyncio

import pytest
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import KEPT_BYTES, Evidence, proof_of_free
from headrace_coordinator.domain.state import InstanceState, restore, snapshot
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings, InstanceUsage, Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_servicekit.lease.usage import GPU_OLD_S

GPU, CORE = "GPU-8f2a/gpu:0", "boot-1/cpu:0"
MIB = 2**20
TTL = FleetSettings().lease_ttl


class Doubted:
    """A coordinator whose instance `old`, in a container of its own, held a GPU and a core and fell silent."""

    def __init__(self, tmp_path):
        self.monotonic = 0.0
        self.store = MemoryStore()
        self.event_log = EventLog(self.store, lambda: 1000.0 + self.monotonic, lambda: self.monotonic)
        self.fleet = Fleet(self.event_log, lambda kind, address, incarnation: None, FleetSettings())
        self.coordinator = Coordinator(self.event_log, self.fleet, tmp_path)

    async def open(self):
        await self.event_log.open("test", None)
        self.writing = asyncio.create_task(self.event_log.run())
        await self.arrive("old", "container-1", "boot-1")
        for epoch, device in enumerate((GPU, CORE), 1):
            granted = ev.LeaseGranted(
                at=0,
                epoch=epoch,
                incarnation="old",
                run="r",
                stage="learn",
                devices=[device],
                host="container-1",
                boot_id="boot-1",
            )
            self.event_log.post(granted)
        self.live(TTL + 3)
        assert self.quarantined == {GPU, CORE}

    async def arrive(self, incarnation, host, boot_id):
        state = InstanceState(
            incarnation, incarnation, "trainer", host, "h:1", [GPU, CORE], {}, boot_id=boot_id
        )
        await self.fleet.register(state, [], 0, self.event_log.state.store_id)
        self.fleet.attach(incarnation, lambda command, body: None)

    def live(self, seconds, beats="", used=None):
        """Sweeps every second; `beats` renews each second, and says how much of the GPU is in use once it is asked."""
        for _ in range(int(seconds)):
            self.monotonic += 1
            if beats:
                usage = InstanceUsage(gpus=((GPU, 0.0, used),) if used is not None else ())
                self.fleet.heartbeat(beats, [], usage)
                self.asked = self.fleet.quarantines.gpus_seen_by(beats)
            self.fleet.sweep_once()

    @property
    def quarantined(self):
        return set(self.event_log.state.table.quarantined)


@pytest.fixture
async def doubted(tmp_path):
    made = Doubted(tmp_path)
    await made.open()
    yield made
    made.writing.cancel()
    await asyncio.gather(made.writing, return_exceptions=True)


async def test_a_core_is_free_once_its_holder_has_stopped_by_its_own_clock(doubted):
    doubted.live(TTL - 5)
    assert doubted.quarantined == {GPU, CORE}, "the holder may still compute"
    doubted.live(6)
    assert doubted.quarantined == {GPU}, "of a GPU it may hold memory"
    doubted.live(100 * TTL)
    assert doubted.quarantined == {GPU}
    assert set(restore(snapshot(doubted.event_log.state)).table.quarantined) == {GPU}


async def test_a_coordinator_that_stood_still_waits_a_lease_lifetime_anew(doubted):
    doubted.monotonic += 100 * TTL
    doubted.fleet.sweep_once()
    doubted.live(TTL - 2)
    assert doubted.quarantined == {GPU, CORE}


@pytest.mark.parametrize(("used", "free"), [(3 * MIB, True), (900 * MIB, False), (None, False)])
async def test_a_gpu_is_free_once_an_instance_that_sees_it_measures_that_nobody_uses_it(doubted, used, free):
    await doubted.arrive("new", "container-2", "boot-1")
    doubted.live(5, "new", used)
    assert doubted.asked == [GPU], "a core has no memory of its own to measure"
    assert GPU in doubted.quarantined, "its holder's time is not over"
    doubted.live(TTL - 5, "new", used)
    assert GPU in doubted.quarantined, "what was measured before that says nothing of it"
    doubted.live(GPU_OLD_S + 2, "new", used)
    assert (GPU not in doubted.quarantined) is free


async def test_a_figure_of_an_instance_that_fell_silent_frees_no_gpu(doubted):
    await doubted.arrive("new", "container-2", "boot-1")
    doubted.live(5, "new", 3 * MIB)
    doubted.live(TTL - 6)
    doubted.live(100, used=None)
    assert GPU in doubted.quarantined, "the holder may have taken memory since"


async def test_a_machine_that_was_started_again_has_no_process_of_before(doubted):
    await doubted.arrive("new", "container-2", "boot-1")
    doubted.live(2 * TTL, "new")
    await doubted.arrive("newer", "container-3", "boot-2")
    doubted.live(TTL - 5, "newer")
    assert GPU in doubted.quarantined, "one of the holder's boot lives: two kernels see one GPU"
    doubted.live(TTL, "newer")
    assert GPU not in doubted.quarantined, "and that one is gone"


async def test_a_new_boot_frees_no_gpu_that_its_instances_can_still_measure(doubted):
    doubted.live(10 * TTL)
    await doubted.arrive("newer", "sandbox-2", "boot-2")
    doubted.live(GPU_OLD_S - 2, "newer")
    assert GPU in doubted.quarantined, "it has had no time to measure"
    doubted.live(100, "newer", 900 * MIB)
    assert GPU in doubted.quarantined, "the holder lives in another sandbox"


STOPPED = {"holder_stopped": True, "holders_boot": "b"}


@pytest.mark.parametrize(
    ("device", "evidence", "why"),
    [
        (CORE, {"holder_stopped": False}, ""),
        (CORE, STOPPED, "one lease lifetime has passed"),
        (GPU, {"holder_stopped": False, "used": 0, "holders_boot": "b", "boots": frozenset("c")}, ""),
        (GPU, STOPPED, ""),
        (GPU, {**STOPPED, "used": KEPT_BYTES}, "nobody uses it"),
        (GPU, {**STOPPED, "used": KEPT_BYTES + 1}, ""),
        (GPU, {**STOPPED, "used": KEPT_BYTES + 1, "boots": frozenset("c")}, ""),
        (GPU, {**STOPPED, "boots": frozenset("c")}, "started again"),
        (GPU, {**STOPPED, "boots": frozenset("bc")}, ""),
        (GPU, {**STOPPED, "boots": frozenset({""})}, ""),
        (GPU, {**STOPPED, "holders_boot": "", "boots": frozenset("c")}, ""),
    ],
)
def test_what_proves_a_device_free(device, evidence, why):
    found = proof_of_free(device, Evidence(**evidence))
    assert why in found and bool(found) == bool(why)


async def test_a_scalers_word_frees_what_a_container_held_unless_its_supervisor_is_here(doubted):
    doubted.fleet.hosts_gone(["container-9"])
    assert doubted.quarantined == {GPU, CORE}
    doubted.fleet.supervised(
        Supervisor("container-1", lambda *command: None, incarnations=frozenset({"old"}))
    )
    doubted.fleet.hosts_gone(["container-1"])
    assert doubted.quarantined == {GPU, CORE}, "the scaler is wrong: it is connected"
    del doubted.fleet.supervisors["container-1"]
    doubted.fleet.hosts_gone(["container-1"])
    assert not doubted.quarantined


async def test_a_person_releases_a_device_by_name_once(doubted):
    release = doubted.coordinator.instance_changes.release_device
    with pytest.raises(Refused, match=r"no device in quarantine is called 'gpu:9'.* GPU-8f2a/gpu:0"):
        await release("gpu:9", "k0")
    assert await release("gpu:0", "k1", "rebooted") == await release("gpu:0", "k1", "rebooted") == GPU
    assert doubted.quarantined == {CORE}
    written = [ev.decode(payload) for _, payload in (await doubted.store.load()).events]
    told = [event for event in written if isinstance(event, ev.DeviceFreed)]
    assert [(event.device, event.holder, event.author) for event in told] == [(GPU, "old", "user")]
    assert told[0].cause == "a person says that it is free: rebooted"


async def test_a_persons_word_is_refused_while_the_holder_is_there(doubted):
    release = doubted.coordinator.instance_changes.release_device
    listed = Supervisor("container-1", lambda *command: None, incarnations=frozenset({"old"}))
    doubted.fleet.supervised(listed)
    with pytest.raises(Refused, match=r"a connected supervisor runs; .*headrace drain old") as refused:
        await release(GPU, "k1")
    assert refused.value.reason == "CONFLICT" and GPU in doubted.quarantined
    del doubted.fleet.supervisors["container-1"]
    await doubted.arrive("old", "container-1", "boot-1")
    with pytest.raises(Refused, match="is connected; end it first"):
        await release(GPU, "k2")
    doubted.live(TTL + 3)
    assert await release(GPU, "k3") == GPU, "it fell silent"
