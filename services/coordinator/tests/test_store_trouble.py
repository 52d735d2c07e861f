"""A real store that refuses writes, and copies of it from the past: the leader stays, and goes on."""

import asyncio
import shutil
import time

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings, ForeignInstance
from headrace_coordinator.store import redis_store
from headrace_coordinator.store.base import LEAP, DamagedStore, Fenced, StoreAway
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.redis_store import RedisStore

REFUSALS = {
    "out of memory": ({"maxmemory": "1"}, {"maxmemory": "0"}, "maxmemory"),
    "no replica": ({"min-replicas-to-write": "1"}, {"min-replicas-to-write": "0"}, "good replicas"),
}


@pytest.fixture(autouse=True)
def short_claim(monkeypatch):
    monkeypatch.setattr(redis_store, "CLAIM_SECONDS", 2)


@pytest.fixture
async def leading(server, tmp_path):
    """`await leading()` is an event log with its two tasks on the server's store."""
    tasks = []

    async def start():
        store = RedisStore(server.url)
        event_log = EventLog(store, time.time)
        await event_log.open("test", tmp_path / "store_id")
        tasks.extend(asyncio.ensure_future(work) for work in (event_log.run(), event_log.keep_claim(0.5)))
        return event_log

    yield start
    for task in tasks:
        task.cancel()


async def configure(server, settings):
    client = RedisStore(server.url)._redis
    for name, value in settings.items():
        await client.config_set(name, value)
    await client.aclose()


def submitted(run):
    spec = {"algorithm": {"group_size": 2, "prompts_per_step": 2}, "steps": 3}
    return ev.RunSubmitted(at=1.0, run=run, spec=spec, directory="d")


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_store_that_refuses_for_longer_than_the_claim_keeps_its_leader(server, leading, case):
    refuse, accept, words = REFUSALS[case]
    event_log = await leading()
    await event_log.commit(submitted("before"))
    await configure(server, refuse)
    commit = asyncio.create_task(event_log.commit(submitted("r")))
    await event_log.wait_until(lambda: event_log.store_away, 20, "the refusal to be noticed")
    await asyncio.sleep(2.5 * redis_store.CLAIM_SECONDS)
    assert words in event_log.store_trouble and not commit.done() and not event_log.fenced.done()
    await configure(server, accept)
    await asyncio.wait_for(commit, 20)
    await event_log.wait_until(lambda: not event_log.store_away, 20, "the store's return to be noticed")
    assert not event_log.fenced.done()
    store = RedisStore(server.url)
    async with asyncio.timeout(20):
        while await store._leader() != event_log._store._identity:  # noqa: ASYNC110  # only the server can say
            await asyncio.sleep(0.05)
    assert (await store.load()).epoch == event_log.state.epoch


async def test_a_refusing_store_is_noticed_while_nothing_is_written(server, leading):
    event_log = await leading()
    await event_log.flush()
    await configure(server, {"maxmemory": "1"})
    await event_log.wait_until(lambda: event_log.store_away, 20, "the refusal to be noticed")
    await configure(server, {"maxmemory": "0"})
    await event_log.wait_until(lambda: not event_log.store_away, 20, "the store's return to be noticed")


async def test_a_full_disk_is_a_refusal_too(server, leading, tmp_path):
    """MISCONF: the last snapshot could not be written, so the server takes no writes."""
    event_log = await leading()
    await event_log.flush()
    client = RedisStore(server.url)._redis
    await client.config_set("save", "3600 1")
    (server.directory / "dump.rdb").mkdir()  # The snapshot cannot be renamed onto a directory.
    await client.bgsave()
    commit = asyncio.create_task(event_log.commit(submitted("r")))
    await event_log.wait_until(lambda: "MISCONF" in event_log.store_trouble, 20, "MISCONF")
    await asyncio.sleep(1.5 * redis_store.CLAIM_SECONDS)
    assert not event_log.fenced.done()
    await client.config_set("stop-writes-on-bgsave-error", "no")
    await asyncio.wait_for(commit, 20)
    assert not event_log.fenced.done()
    await client.aclose()


async def test_no_second_leader_comes_in_while_the_first_could_not_renew(server, leading, monkeypatch):
    monkeypatch.setattr(redis_store, "_is_gone", lambda leader: False)
    first = await leading()
    await first.flush()
    await configure(server, REFUSALS["no replica"][0])
    second = RedisStore(server.url)
    with pytest.raises(Fenced, match="another coordinator leads"):
        await second.claim("the second")
    await asyncio.sleep(1.5 * redis_store.CLAIM_SECONDS)
    with pytest.raises(StoreAway, match="refuses"):
        await second.claim("the second")  # The claim ran out, but nobody could have renewed it.
    await configure(server, REFUSALS["no replica"][1])
    with pytest.raises(Fenced, match="another coordinator leads"):
        await second.claim("the second")
    await first.commit(submitted("r"))
    assert not first.fenced.done()


async def test_a_claim_that_another_took_is_not_taken_back(server, leading, monkeypatch):
    first = await leading()
    await first.flush()
    monkeypatch.setattr(redis_store, "_is_gone", lambda leader: True)
    second = RedisStore(server.url)
    await second.claim("the second")
    assert "the second" in await asyncio.wait_for(first.fenced, 20)


def process(incarnation):
    return InstanceState(
        instance="trainer-0",
        incarnation=incarnation,
        kind="trainer",
        host="h",
        address="",
        devices=[],
        capabilities={},
    )


def fleet_of(event_log):
    return Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())


async def test_an_instance_that_saw_a_higher_epoch_raises_it_and_the_coordinator_goes_on(server, leading):
    event_log = await leading()
    fleet, store_id = fleet_of(event_log), event_log.state.store_id
    held = asyncio.gather(*(event_log.commit(submitted(f"r{i}")) for i in range(20)))
    await asyncio.gather(*(fleet.register(process(name), [], 1000, store_id) for name in ("a", "b")))
    assert event_log.state.epoch == 1001
    await held
    await event_log.commit(submitted("after"))
    await asyncio.sleep(1.2)
    assert not event_log.fenced.done(), "neither an append nor the claim may be fenced by its own epoch"
    stored = await RedisStore(server.url).load()
    assert stored.epoch == 1001
    again = await leading()
    assert again.state.epoch == 1002 and "after" in again.state.runs


@pytest.mark.parametrize(("store_id", "epoch"), [("another", 1000), ("another", 1), ("", 1000)])
async def test_an_instance_of_another_store_is_refused_and_changes_nothing(leading, store_id, epoch):
    event_log = await leading()
    fleet = fleet_of(event_log)
    with pytest.raises(ForeignInstance, match=r"trainer-0 .*Restart the instance"):
        await fleet.register(process("a"), [], epoch, store_id)
    await event_log.commit(submitted("after"))
    assert event_log.state.epoch == 1 and "a" not in event_log.state.instances
    await fleet.register(process("a"), [], 1, event_log.state.store_id)


async def test_an_older_copy_of_the_store_is_recognised_and_issues_nothing_twice(
    server, leading, tmp_path, caplog
):
    event_log = await leading()
    await event_log.commit(submitted("r"), ev.NumberBurnt(at=1.0, run="r", number=7))
    server.kill()
    shutil.copytree(server.directory, tmp_path / "copy")
    server.start()
    for _ in range(3):
        later = await leading()
        number = later.state.runs["r"].lineage.last_number + 1
        await later.commit(ev.NumberBurnt(at=1.0, run="r", number=number))
        later.mark()
        seen = (later.state.epoch, later.durable_sequence, number)
    server.kill()
    shutil.rmtree(server.directory)
    shutil.copytree(tmp_path / "copy", server.directory)
    server.start()
    restored = await leading()
    await restored.commit(submitted("s"))
    assert "it is an older copy" in caplog.text
    assert restored.state.epoch > seen[0]
    assert restored.durable_sequence > seen[1]
    assert restored.state.runs["r"].lineage.last_number >= seen[2]
    assert restored.state.table.last_epoch >= 4 * LEAP
    assert (await leading()).state.epoch == restored.state.epoch + 1


@pytest.mark.parametrize("garbage", ["event", "snapshot"])
async def test_garbage_in_the_store_is_named_in_one_sentence(server, leading, garbage):
    event_log = await leading()
    await event_log.commit(submitted("r"), ev.NumberBurnt(at=1.0, run="r", number=7))
    store, last = RedisStore(server.url), event_log.durable_sequence
    if garbage == "event":
        entry = {"e": b'{"type":"NumberBurnt","at":\xff\x00'}
        await store._redis.xadd(store._key("log"), entry, id=f"{last + 1}-0")
        words = f"event {last + 1} of the log cannot be read .* The last good one is event {last}[.]"
    else:
        mapping = {"sequence": str(last), "data": b"\x00{"}
        await store._redis.hset(store._key("snapshot"), mapping=mapping)
        words = f"the snapshot of event {last} cannot be read"
    with pytest.raises(DamagedStore, match=words) as damaged:
        await leading()
    assert "\n" not in str(damaged.value)
    await store.close()
