"""The event log on a real server that speaks Redis's protocol: conditional append, restart, snapshot, fencing."""

import asyncio
import socket
import time

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.store.base import LEAP, Fenced, ForeignStore, StoreAway
from headrace_coordinator.store.event_log import SNAPSHOT_EVERY, EventLog
from headrace_coordinator.store.redis_store import RedisStore


async def opened_kernel(server, marker=None):
    event_log = EventLog(RedisStore(server.url), time.time)
    await event_log.open("test", marker)
    return event_log, asyncio.create_task(event_log.run())


def submitted(run):
    spec = {"algorithm": {"group_size": 2, "prompts_per_step": 2}, "steps": 3}
    return ev.RunSubmitted(at=1.0, run=run, spec=spec, directory="d")


async def test_append_needs_the_epoch_and_the_end_of_the_log(server):
    store = RedisStore(server.url)
    await store.begin(3, "id")
    await store.append(3, 0, 10, [b"a", b"b"])
    with pytest.raises(Fenced, match="active coordinator epoch is 3"):
        await store.append(2, 11, 12, [b"c"])
    with pytest.raises(Fenced, match="the log ends at 11, not at 9"):
        await store.append(3, 9, 12, [b"c"])
    assert (await store.load()).events == [(10, b"a"), (11, b"b")]


async def test_a_repeated_append_is_written_once(server):
    store = RedisStore(server.url)
    await store.begin(1, "id")
    for _ in range(2):
        await store.append(1, 0, 1, [b"a", b"b"])
    assert len((await store.load()).events) == 2


async def test_an_older_coordinator_is_fenced_once_a_newer_one_begins(server):
    old, old_task = await opened_kernel(server)
    new, new_task = await opened_kernel(server)
    old.post(submitted("lost"))
    assert "FENCED" in await asyncio.wait_for(old.fenced, 10)
    await new.commit(submitted("kept"))
    assert set(new.state.runs) == {"kept"}
    old_task.cancel(), new_task.cancel()


async def test_committed_events_survive_kill_9_of_the_server_and_of_the_coordinator(server):
    event_log, task = await opened_kernel(server)
    await event_log.commit(submitted("r"), ev.NumberBurnt(at=1.0, run="r", number=7))
    task.cancel()
    server.kill()
    server.start()
    again, task = await opened_kernel(server)
    assert again.state.runs["r"].lineage.last_number == 7 + LEAP
    assert again.state.epoch == event_log.state.epoch + 1
    assert [type(event).__name__ for _, event in await again.history.page("r", -1)] == ["RunSubmitted"]
    task.cancel()


async def test_events_that_nobody_waits_for_are_durable_soon_and_share_an_append(server):
    event_log, task = await opened_kernel(server)
    await event_log.commit(submitted("r"))
    appends = []
    store_append = event_log._store.append

    async def append(epoch, expected, first, entries):
        appends.append(len(entries))
        await store_append(epoch, expected, first, entries)

    event_log._store.append = append
    for number in range(3):
        event_log.post(ev.NumberBurnt(at=1.0, run="r", number=number))
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        while event_log.durable_sequence < event_log._sequence:  # noqa: ASYNC110  nobody waits for them
            await asyncio.sleep(0.01)
    assert appends == [3]
    event_log.post(ev.NumberBurnt(at=1.0, run="r", number=3))
    await event_log.commit(ev.NumberBurnt(at=1.0, run="r", number=4))
    assert appends == [3, 2]
    task.cancel()


async def test_the_kernel_waits_while_the_store_is_away_and_goes_on(server):
    event_log, task = await opened_kernel(server)
    await event_log.flush()
    server.kill()
    commit = asyncio.create_task(event_log.commit(submitted("r")))
    await event_log.wait_until(lambda: event_log.store_away, 20, "the outage to be noticed")
    assert not commit.done()
    server.start()
    await asyncio.wait_for(commit, 30)
    assert not event_log.store_away
    task.cancel()


async def test_a_snapshot_trims_the_log_and_gives_the_same_state(server):
    event_log, task = await opened_kernel(server)
    await event_log.commit(submitted("r"))
    for number in range(SNAPSHOT_EVERY + 10):
        event_log.post(ev.NumberBurnt(at=1.0, run="r", number=number))
    await event_log.flush()
    store = RedisStore(server.url)
    deadline = time.monotonic() + 20
    while not (stored := await store.load()).snapshot:
        assert time.monotonic() < deadline, "no snapshot was written"
        await asyncio.sleep(0.05)
    assert len(stored.events) < SNAPSHOT_EVERY
    task.cancel()
    again, task = await opened_kernel(server)
    assert again.state.runs["r"].lineage.last_number == SNAPSHOT_EVERY + 9 + LEAP
    task.cancel()


async def test_a_coordinator_that_starts_often_trims_the_log_too(server):
    store = RedisStore(server.url)
    for start in range(3):
        event_log, task = await opened_kernel(server)
        if not start:
            await event_log.commit(submitted("r"))
        for number in range(SNAPSHOT_EVERY // 2):
            event_log.post(ev.NumberBurnt(at=1.0, run="r", number=number))
        await event_log.flush()
        deadline = time.monotonic() + 20
        while start == 2 and not (await store.load()).snapshot:
            assert time.monotonic() < deadline, "no snapshot was written"
            await asyncio.sleep(0.05)
        task.cancel()


async def test_a_store_may_ask_for_a_password(server):
    await RedisStore(server.url)._redis.config_set("requirepass", "secret")
    await RedisStore(server.url, password="secret").begin(1, "id")
    with pytest.raises(StoreAway, match="Authentication"):
        await RedisStore(server.url, password="other").load()


async def test_an_emptied_store_is_refused_by_its_data_directory(server, tmp_path):
    marker = tmp_path / "store_id"
    _, task = await opened_kernel(server, marker)
    await asyncio.sleep(0)
    task.cancel()
    await RedisStore(server.url)._redis.flushall()
    with pytest.raises(ForeignStore, match="Redis is empty"):
        await opened_kernel(server, marker)


async def test_a_second_coordinator_of_another_process_is_refused_by_name(server):
    holder = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        store = RedisStore(server.url)
        record = f'{{"who": "coordinator at there", "host": "{socket.gethostname()}", "pid": {holder.pid}}}'
        await store._redis.set("headrace:leader", record)
        with pytest.raises(Fenced, match="coordinator at there"):
            await store.claim("me")
    finally:
        holder.kill()
        await holder.wait()
    await store.claim("me")  # The leader's process is gone: its place is taken at once.
